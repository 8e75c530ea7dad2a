"""What every backend promises, on two ranks."""

import warnings
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.backends.comm import joined
from burnish.backends.fsdp.backend import FsdpBackend
from burnish.backends.megatron.layout import layout_of
from burnish.backends.megatron.sizes import Sizes
from burnish.models.loss import Objective
from tests.backends.steps import batch_of, draw, grouped, place_of, summed_loss
from tests.ranks import on_ranks
from tests.toys import save_model

LR = 1e-3
KINDS = {
    "fsdp": ("fsdp", Sizes()),
    "megatron TP2": ("megatron", Sizes(tensor=2)),
    "megatron PP2": ("megatron", Sizes(pipeline=2)),
    "megatron DP2": ("megatron", Sizes()),
}
POOLS = {"fsdp": "", "megatron": "megatron"}


def make_fsdp(ranks, _, **settings):
    return FsdpBackend(ranks=ranks, layout=place_of(ranks.rank, ranks.world_size), **settings)


def make_megatron(ranks, sizes, *, sharding, **settings):
    del sharding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from burnish.backends.megatron.cpu import install

        install()
        from burnish.backends.megatron.backend import MegatronBackend
    layout = layout_of(sizes, rank=ranks.rank, world_size=ranks.world_size)
    return MegatronBackend(ranks=ranks, layout=layout, sizes=sizes, **settings)


@contextmanager
def opened(kind, model_dir, ranks, **settings):
    """A backend of this ``kind`` on this rank."""
    strategy, sizes = KINDS[kind]
    defaults = {"num_steps": 10, "num_sources": 2, "learning_rate": LR, "eps": 1e-6, "schedule": "constant"}
    make = make_fsdp if strategy == "fsdp" else make_megatron
    with closing(make(ranks, sizes, model_path=model_dir, **grouped({**defaults, **settings}))) as backend:
        yield backend


def on_a_rank(kind, model_dir, function, arguments, settings):
    with joined("cpu") as ranks, opened(kind, model_dir, ranks, **settings) as backend:
        return function(backend, *arguments)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Large enough that on a disk its numbers take more than their names."""
    return save_model(tmp_path_factory.mktemp("model"), vocabulary=4096)


@pytest.fixture(params=list(KINDS))
def kind(request):
    return request.param


@pytest.fixture
def on_backends(kind, model_dir):
    """What ``function(backend, *arguments)`` returns on each rank; ``settings`` are those of the backend."""

    def run(function, *arguments, **settings):
        pool = POOLS[KINDS[kind][0]]
        return on_ranks(2, on_a_rank, kind, str(model_dir), function, arguments, settings, pool=pool)

    return run


def batch(backend, number):
    """This rank's part of the step of this number (0 is the first)."""
    return batch_of(draw(number), step=number + 1, place=backend.layout)


def evaluated(backend):
    return backend.eval_loss(batch(backend, 0))


def trained(backend, numbers, *, looking=False):
    losses = []
    for number in numbers:
        if looking:
            evaluated(backend)
        losses.append(backend.train_step(batch(backend, number)).loss)
    return losses


def one_step(backend):
    before = evaluated(backend)
    return before, backend.train_step(batch(backend, 0)), evaluated(backend)


def test_a_step_is_taken_and_says_the_same_on_all_ranks(on_backends, model_dir):
    first, second = on_backends(one_step)
    before, result, after = first
    assert (before, after) == (second[0], second[2])
    assert (result.loss_sums, result.num_targets, result.grad_norm) == (
        second[1].loss_sums,
        second[1].num_targets,
        second[1].grad_norm,
    )
    rows = draw(0)
    of_source = [[row for number, row in enumerate(rows) if number % 2 == source] for source in (0, 1)]
    assert result.num_targets == tuple(sum(int(r.loss_mask[1:].sum()) for r in source) for source in of_source)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    assert result.loss_sums == pytest.approx([summed_loss(model, source).item() for source in of_source], rel=1e-5)
    assert before == (pytest.approx(sum(result.loss_sums), rel=1e-6), sum(result.num_targets))
    assert after[1] == before[1]
    assert after[0] < 0.99 * before[0]
    assert result.grad_norm > 0
    assert (result.learning_rate, result.skipped) == (LR, False)
    assert result.timings.keys() == {"forward_backward", "optimizer"}
    assert all(seconds > 0 for seconds in result.timings.values())
    assert 0 < result.memory_peak_gib < 16


def test_an_evaluation_changes_nothing(on_backends):
    found = on_backends(evaluated_twice)
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]
    assert on_backends(trained, range(3)) == on_backends(looking_on, range(3))


def evaluated_twice(backend):
    return evaluated(backend), evaluated(backend)


def looking_on(backend, numbers):
    return trained(backend, numbers, looking=True)


def saved(backend, folder):
    """Trains on while it is written. (Losses of the steps that follow, losses of the same once it was loaded.)"""
    trained(backend, range(2))
    at_save = evaluated(backend)
    pending = backend.save(Path(folder))
    going_on = trained(backend, range(2, 5))
    pending.wait()
    assert pending.done
    backend.load(Path(folder))
    assert evaluated(backend) == at_save
    return going_on, trained(backend, range(2, 5)), at_save, backend.save_bytes


def loaded(backend, folder):
    """Losses that follow, of a backend that has only been opened; and its evaluation before."""
    backend.load(Path(folder))
    return evaluated(backend), trained(backend, range(2, 5))


def weights_loaded(backend, folder):
    backend.load(Path(folder), weights_only=True)
    return evaluated(backend), trained(backend, range(2, 5))


def test_what_is_saved_is_loaded(on_backends, tmp_path):
    found = on_backends(saved, str(tmp_path / "save"))
    going_on, again, at_save, _ = found[0]
    assert again == pytest.approx(going_on, rel=1e-7)
    on_disk = sum(file.stat().st_size for file in (tmp_path / "save").rglob("*") if file.is_file())
    assert on_disk / 2 < sum(save_bytes for *_, save_bytes in found) < on_disk * 2
    for number, losses in on_backends(loaded, str(tmp_path / "save")):
        assert number == at_save
        assert losses == pytest.approx(going_on, rel=1e-7)
    for number, losses in on_backends(weights_loaded, str(tmp_path / "save")):
        assert number == at_save
        assert losses[0] == pytest.approx(going_on[0], rel=1e-7)
        assert losses[2] != pytest.approx(going_on[2], rel=1e-6), "its moments begin anew"


def exported(backend, folder):
    trained(backend, range(2))
    backend.export(Path(folder))
    assert (Path(folder) / "config.json").is_file(), "no rank is ahead of the files"
    return evaluated(backend)


def test_an_export_is_the_model(on_backends, tmp_path):
    (loss, _), _ = on_backends(exported, str(tmp_path / "export"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32, attn_implementation="eager")
    assert summed_loss(model, draw(0)).item() == pytest.approx(loss, rel=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template


def answered(backend, prompts):
    trained(backend, range(2))
    answers = backend.generate(prompts, max_new_tokens=6)
    return answers, trained(backend, range(2, 4))


def test_answers_are_greedy_and_change_nothing(on_backends, tmp_path):
    """More prompts than are answered at once, of several lengths; the model is the export of the same steps."""
    prompts = [[5, 9, 30], [7], *([40 + n, 41, 50][: 1 + n % 3] for n in range(8))]
    (first, losses), (second, others) = on_backends(answered, prompts)
    assert (first, losses) == (second, others)
    assert losses == on_backends(trained, range(4))[0][2:]
    on_backends(exported, str(tmp_path / "export"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    for prompt, answer in zip(prompts, first, strict=True):
        ids, expected = torch.tensor([prompt]), []
        while (
            len(expected) < 6 and (token := int(model(input_ids=ids).logits[0, -1].argmax())) != tokenizer.eos_token_id
        ):
            expected.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
        assert answer == expected


def bad_step(backend):
    before = evaluated(backend)
    result = backend.train_step(batch(backend, 1))
    return before, result.skipped, evaluated(backend)


def test_a_step_whose_loss_is_not_finite_changes_nothing(on_backends):
    for before, skipped, after in on_backends(bad_step, objective=Objective(z_loss=3e38)):
        assert skipped
        assert after == before


def opened_twice(kind, model_dir):
    losses = []
    with joined("cpu") as ranks:
        for _ in range(2):
            with opened(kind, model_dir, ranks) as backend:
                losses.append(trained(backend, range(2)))
    return losses


def test_one_that_was_closed_can_be_opened_again(kind, model_dir):
    for first, second in on_ranks(2, opened_twice, kind, str(model_dir), pool=POOLS[KINDS[kind][0]]):
        assert first == second
