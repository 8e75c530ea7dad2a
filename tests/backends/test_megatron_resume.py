"""Checkpoints of the Megatron backend: exact where nothing changes, and right in any other cut."""

from contextlib import nullcontext
from itertools import combinations_with_replacement
from unittest.mock import patch

import pytest

from burnish.backends.megatron.sizes import Sizes
from burnish.errors import BurnishError
from tests.backends.megatron_runs import ALL, LR, on_megatron, opened, step_rows, train
from tests.backends.steps import batch_of, reference_run
from tests.backends.steps import opened as opened_fsdp
from tests.backends.test_megatron_weights import save_family
from tests.ranks import on_ranks
from tests.toys import save_model, save_tokenizer

ONE, DP2, TP2, PP2, CP2 = (1, {}), (2, {}), (2, {"tensor": 2}), (2, {"pipeline": 2}), (2, {"context": 2})
SP2xPP2, SP2xDP2 = (4, {"tensor": 2, "sequence_parallel": True, "pipeline": 2}), (4, {"tensor": 2})
VP2, PP2xDP2, EP2 = (2, {"pipeline": 2, "virtual_pipeline": 2}), (4, {"pipeline": 2}), (2, {"expert": 2})
SOME_CHAINS = {
    "TP2, 1": ("tied", TP2, ONE),
    "DP2, PP2": ("tied", DP2, PP2),
    "untied: PP2, TP2": ("untied", PP2, TP2),
}
MORE_CHAINS = {
    "PP2, CP2": ("tied", PP2, CP2),
    "1, TP2": ("tied", ONE, TP2),
    "CP2, DP2": ("tied", CP2, DP2),
    "DP2, 1, TP2 x PP2": ("tied", DP2, ONE, SP2xPP2),
    "PP2 x DP2, TP2 x DP2": ("tied", PP2xDP2, SP2xDP2),
    "untied: DP2, 1, TP2 x PP2": ("untied", DP2, ONE, SP2xPP2),
    "untied: DP3, PP2 x DP2": ("untied", (3, {}), PP2xDP2),
    "experts: VP2, EP2": ("experts", VP2, EP2),
    "experts: EP2, 1": ("experts", EP2, ONE),
    "experts: 1, TP2 x PP2": ("experts", ONE, SP2xPP2),
}
CHAINS = {**SOME_CHAINS, **MORE_CHAINS} if ALL else SOME_CHAINS
SMALL_BUCKETS = {"TP2, 1": ("tied", TP2, ONE), "DP2, PP2": ("tied", DP2, PP2), "untied: DP2, TP2": ("untied", DP2, TP2)}
SAME = {"DP2": DP2, "TP2 x PP2": SP2xPP2, "CP2": CP2, "PP2 x DP2": PP2xDP2} if ALL else {"DP2": DP2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{kind: (folder, (losses, norms) of seven steps)}; a vocabulary of 97 fills up on two ranks."""
    made = {}

    def of(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            if kind == "experts":
                save_tokenizer(save_family(folder, "qwen3-moe"))
            else:
                save_model(folder, tied=kind == "tied", vocabulary=97)
            made[kind] = folder, reference_run(folder, [step_rows(number) for number in range(7)], lr=LR)[:2]
        return made[kind]

    return of


@pytest.fixture(scope="module")
def model_dir(models):
    return models("tied")[0]


def saved(model_dir, sizes, folder, buckets, settings):
    """(losses, norms) of the two steps after a checkpoint of the third, which is written meanwhile."""
    with (
        small_buckets() if buckets == "small" else nullcontext(),
        opened(model_dir, sizes=sizes, **settings) as backend,
    ):
        found = {len(buffer.buckets) for part in backend._optimizer.parts for buffer in part.buffers}
        assert buckets != "small" or min(found) > 2
        train(backend, range(3), "shared")
        pending = backend.save(folder)
        after = train(backend, range(3, 5), "shared")
        pending.wait()
        assert pending.done
        return after


def resumed(model_dir, sizes, folder, numbers, to, settings):
    """(losses, norms) of steps after a checkpoint, and one more of the last of them."""
    with opened(model_dir, sizes=sizes, **settings) as backend:
        for model in backend._models:
            for parameter in model.parameters():
                parameter.data.fill_(0.123)
        backend.load(folder)
        after = train(backend, numbers, "shared")
        backend.save(to).wait()
        return after


def small_buckets():
    """Gradients in buffers of many buckets, whose ends are padding, as those of a large model."""
    from burnish.backends.megatron.cpu import install

    install()
    from burnish.backends.megatron import optimizer

    class Small(optimizer.DistributedDataParallelConfig):
        def __setattr__(self, name, value):
            super().__setattr__(name, 3000 if name == "bucket_size" else value)

    return patch.object(optimizer, "DistributedDataParallelConfig", Small)


def follow(models, chain, tmp_path, *, buckets=""):
    """Each part of ``chain`` goes on from the checkpoint of the one before, with the numbers of an unbroken loop."""
    kind, (ranks, sizes), *rest = chain
    model_dir, (losses, norms) = models(kind)
    on_megatron(ranks, saved, model_dir, Sizes(**sizes), tmp_path / "3", buckets, {})
    for number, (ranks, sizes) in enumerate(rest):
        begin, end = 3 + 2 * number, 5 + 2 * number
        places = (tmp_path / str(begin), range(begin, end), tmp_path / str(end))
        for found in on_megatron(ranks, resumed, model_dir, Sizes(**sizes), *places, {}):
            assert found[0] == pytest.approx(losses[begin:end], rel=1e-5)
            assert found[1] == pytest.approx(norms[begin:end], rel=1e-5)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_goes_on_in_another_cut(models, chain, tmp_path):
    follow(models, CHAINS[chain], tmp_path)


@pytest.mark.parametrize("chain", SMALL_BUCKETS if ALL else ["DP2, PP2"])
def test_a_checkpoint_of_many_buckets_goes_on(models, chain, tmp_path):
    follow(models, SMALL_BUCKETS[chain], tmp_path, buckets="small")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cut", SAME)
def test_a_checkpoint_of_the_same_cut_is_exact(model_dir, cut, dtype, tmp_path):
    ranks, sizes = SAME[cut]
    arguments = (model_dir, Sizes(**sizes), tmp_path / "save")
    whole = on_megatron(ranks, saved, *arguments, "", {"dtype": dtype})
    assert on_megatron(ranks, resumed, *arguments, range(3, 5), tmp_path / "next", {"dtype": dtype}) == whole


def refusal(model_dir, folder):
    """What loading ``folder`` says."""
    with opened(model_dir) as backend:
        try:
            backend.load(folder)
        except BurnishError as error:
            return str(error)
        return "nothing"


def saved_by_fsdp(model_dir, folder):
    with opened_fsdp(model_dir, num_steps=1) as backend:
        backend.save(folder).wait()


def loaded_by_fsdp(model_dir, folder):
    with opened_fsdp(model_dir, num_steps=1) as backend:
        try:
            backend.load(folder)
        except BurnishError as error:
            return str(error)
        return "nothing"


def test_a_checkpoint_of_the_other_backend_is_told_from_ones_own(model_dir, tmp_path):
    on_ranks(1, saved_by_fsdp, model_dir, tmp_path / "fsdp")
    on_megatron(1, saved, model_dir, Sizes(), tmp_path / "megatron", "", {})
    (said,) = on_megatron(1, refusal, model_dir, tmp_path / "fsdp")
    assert "strategy=fsdp" in said
    assert "burnish export" in said
    (said,) = on_ranks(1, loaded_by_fsdp, model_dir, tmp_path / "megatron")
    assert "strategy=megatron" in said
    assert "burnish export" in said


def test_a_checkpoint_of_another_model_is_refused(model_dir, tmp_path):
    on_megatron(1, saved, model_dir, Sizes(), tmp_path / "save", "", {})
    other = save_model(tmp_path / "untied", tied=False, vocabulary=97)
    (said,) = on_megatron(1, refusal, other, tmp_path / "save")
    assert "weights, and the model" in said


def trained_losses(model_dir, folder):
    with opened(model_dir) as backend:
        train(backend, range(3), "shared")
        backend.save(folder).wait()
        return backend.eval_loss(batch_of(step_rows(3)))[0]


def test_weights_alone_can_be_taken_over(model_dir, tmp_path):
    (expected,) = on_megatron(1, trained_losses, model_dir, tmp_path)
    first, second = on_megatron(1, weights_of, model_dir, tmp_path)[0]
    assert first == second == pytest.approx(expected, rel=1e-6)


def weights_of(model_dir, folder):
    """The loss right after loading, and after the optimizer has copied its masters back by a step without a rate."""
    with opened(model_dir, learning_rate=0.0) as backend:
        backend.load(folder, weights_only=True)
        first = backend.eval_loss(batch_of(step_rows(3)))[0]
        train(backend, range(1), "shared")
        return first, backend.eval_loss(batch_of(step_rows(3)))[0]


def covered(rows, columns):
    """Of each run of elements of a matrix: whether its boxes are those elements, in order, and three at most."""
    from burnish.backends.megatron.cpu import install

    install()
    from burnish.backends.megatron.pieces import boxes

    found = []
    for start, stop in combinations_with_replacement(range(rows * columns + 1), 2):
        parts = list(boxes(start, stop, columns=columns))
        assert all(width == columns or height == 1 for _, height, width in parts)
        assert all(first % columns + width <= columns for first, _, width in parts)
        elements = [first + element for first, height, width in parts for element in range(height * width)]
        found.append(elements == list(range(start, stop)) and len(parts) <= 3)
    return found


@pytest.mark.parametrize(("rows", "columns"), [(4, 5), (1, 7), (6, 1)])
def test_a_run_of_elements_is_three_rectangles_at_most(rows, columns):
    (found,) = on_megatron(1, covered, rows, columns)
    assert all(found)
    assert len(found) > rows * columns
