"""However many ranks spread a model, and however: it trains, saves, answers and is exported as on one."""

from contextlib import closing, contextmanager
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from burnish.backends.comm import joined
from burnish.backends.fsdp import backend as backend_module
from burnish.backends.fsdp import shard
from burnish.backends.fsdp.backend import FsdpBackend
from burnish.errors import BurnishError, CheckpointError, StorageError
from tests.backends.steps import batch_of, draw, grouped, place_of, reference_run
from tests.models.families import tiny
from tests.ranks import on_ranks
from tests.toys import save_model, save_tokenizer

# In the last, ranks beyond the first have only filler.
STEPS = [draw(0), draw(1), draw(2, count=1)]
CLIPPED = 0.5
SETTINGS = {"num_steps": 10, "num_sources": 2, "learning_rate": 1e-2, "eps": 1e-6, "max_grad_norm": CLIPPED}
IN_LAYERS = {"min_layer_parameters": 0}


@contextmanager
def opened(ranks, folder, min_layer_parameters=shard.MIN_LAYER_PARAMETERS, **settings):
    place = place_of(ranks.rank, ranks.world_size)
    settings = {"ranks": ranks, "layout": place, "model_path": str(folder), **SETTINGS, **settings}
    with (
        patch.object(shard, "MIN_LAYER_PARAMETERS", min_layer_parameters),
        closing(FsdpBackend(**grouped(settings))) as backend,
    ):
        yield backend


def step(backend, number, **layout):
    rows = STEPS[(number - 1) % len(STEPS)]
    return backend.train_step(batch_of(rows, step=number, place=backend.layout, micro_batch_size=1, **layout))


def weights_of(backend):
    return {name: p.detach().full_tensor().numpy().copy() for name, p in backend._parameters.items()}


def trained(folder, cases):
    """(losses, gradient norms, targets by source, weights) after all steps, for the settings of each case."""
    found = []
    with joined() as ranks:
        for settings in cases:
            with opened(ranks, folder, **settings) as backend:
                results = [step(backend, number) for number in (1, 2, 3)]
                losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
                found.append((losses, norms, [r.num_targets for r in results], weights_of(backend)))
    return found


def assert_equal(got, expected):
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert got[1] == pytest.approx(expected[1], rel=1e-4)
    for name, weight in expected[-1].items():
        assert np.linalg.norm(got[-1][name] - weight) <= 1e-4 * np.linalg.norm(weight), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), vocabulary=96)


@pytest.fixture(scope="module")
def reference(folder):
    """The hand-written loop."""
    losses, norms, model = reference_run(folder, STEPS, lr=1e-2, max_grad_norm=CLIPPED)
    assert min(norms) > CLIPPED
    return losses, norms, {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_steps_equal_the_hand_written_loop(folder, reference, ranks):
    copies = [{"fsdp_size": 1}, {"fsdp_size": 2, **IN_LAYERS}] if ranks == 4 else []
    alone = trained(folder, [{}])[0]
    cases = [
        {},
        IN_LAYERS,
        {"reshard_after_forward": False, **IN_LAYERS},
        {"activation_checkpointing": True, **IN_LAYERS},
        {"cpu_offload": True, **IN_LAYERS},
        *copies,
    ]
    for found in on_ranks(ranks, trained, folder, cases):
        for got in found:
            assert_equal(got, reference)
            assert got[2] == alone[2]


def test_formats_of_mixed_precision_are_used(folder, reference):
    cases = [{"reduce_dtype": torch.bfloat16}, {"param_dtype": "bfloat16"}, {"dtype": "bfloat16"}]
    reduced, computed, model = on_ranks(2, trained, folder, cases)[0]
    for got in (reduced, computed):
        assert got[0] == pytest.approx(reference[0], rel=2e-2)
        assert got[1] == pytest.approx(reference[1], rel=5e-2)
    # The first forward comes before any sum of gradients.
    assert reduced[0][0] == pytest.approx(reference[0][0], rel=1e-6)
    # One value may be the same to that many digits by chance; which, the processor decides.
    assert reduced[1] != pytest.approx(reference[1], rel=1e-5)
    for got, wanted in zip(computed[:2], reference[:2], strict=True):
        assert got != pytest.approx(wanted, rel=1e-5)
    assert computed[:2] == model[:2]


def averaged(folder):
    names = ("set_force_sum_reduction_for_comms", "set_gradient_divide_factor")
    with patch.multiple(FSDPModule, **dict.fromkeys(names, lambda *_: None)):
        return trained(folder, [{}])[0]


def never_synced(folder):
    sync = FSDPModule.set_requires_gradient_sync
    with patch.object(FSDPModule, "set_requires_gradient_sync", lambda module, _: sync(module, False)):
        return trained(folder, [{}])[0]


@pytest.mark.parametrize("fault", [averaged, never_synced])
def test_a_planted_fault_is_found(folder, reference, fault):
    with pytest.raises(AssertionError):
        assert_equal(on_ranks(2, fault, folder)[0], reference)


def messages(folder, settings):
    """How often ranks add something up in a step of one micro-batch, and in one of three."""
    found = []
    with joined() as ranks, opened(ranks, folder, **settings) as backend:
        for count in (4, 12):
            batch = batch_of(draw(5, count=count), place=backend.layout, micro_batch_size=1)
            assert len(batch.micro_batches) == count // 4
            names = [name for name in dir(dist) if name.startswith(("reduce_scatter", "all_reduce"))]
            with patch.multiple(dist, **{name: Mock(wraps=getattr(dist, name)) for name in names}):
                backend.train_step(batch)
                found.append(sum(getattr(dist, name).call_count for name in names))
    return found


@pytest.mark.parametrize(("settings", "sums"), [({}, 2), ({"fsdp_size": 2}, 3)], ids=str)
def test_gradients_are_summed_once_a_step(folder, settings, sums):
    """Within the ranks that share a copy, then over the copies; all else that is summed goes in one message."""
    assert on_ranks(4, messages, folder, settings) == [[sums, sums]] * 4


def with_one_bad(folder, what):
    """Results of three steps and the weights after each; in the second, rank 1 alone finds a number that is none."""
    factors = {"loss": (1.0, float("nan")), "gradient": (float("inf"), 1.0)}[what]
    with joined() as ranks, opened(ranks, folder, **IN_LAYERS) as backend:
        found = [(step(backend, 1), weights_of(backend))]
        spoil = backend._model.register_forward_hook(
            lambda module, args, output: tuple(part * factor for part, factor in zip(output, factors, strict=True))
        )
        if ranks.rank == 0:
            spoil.remove()
        found.append((step(backend, 2), weights_of(backend)))
        spoil.remove()
        found.append((step(backend, 2), weights_of(backend)))
    return found


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(folder, what):
    (good, bad, again), other = on_ranks(2, with_one_bad, folder, what)
    assert [r.skipped for r, _ in (good, bad, again)] == [r.skipped for r, _ in other] == [False, True, False]
    assert not np.isfinite([bad[0].loss, bad[0].grad_norm]).all()
    for name, weight in good[1].items():
        assert np.array_equal(weight, bad[1][name])
        assert np.array_equal(bad[1][name], other[1][1][name])
    expected = trained(folder, [{}])[0]
    assert [good[0].loss, again[0].loss] == pytest.approx(expected[0][:2], rel=1e-5)


def continued(folder, start, place, settings):
    """The weights that were loaded, and the losses of two more steps, saved in ``place``."""
    with joined() as ranks, opened(ranks, folder, **IN_LAYERS, **settings) as backend:
        if start:
            backend.eval_loss(batch_of(STEPS[0], place=backend.layout))
            backend.load(start[0])
        loaded, first = weights_of(backend), start[1] if start else 1
        results = [step(backend, first), step(backend, first + 1)]
        backend.save(place).wait()
        return loaded, [r.loss for r in results], weights_of(backend)


def test_a_checkpoint_continues_on_any_number_of_ranks(tmp_path):
    """With two experts, so that of three ranks one holds no part of them, and few dimensions that three divides."""
    tiny("qwen3-moe", num_experts=2, num_local_experts=2).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    chain = [
        (4, {"fsdp_size": 2}),
        (2, {}),
        (1, {}),
        (3, {}),
        (4, {"cpu_offload": True}),
        (4, {"fsdp_size": 1}),
    ]
    start, before, losses = None, None, []
    for number, (ranks, settings) in enumerate(chain):
        place = tmp_path / f"after {number}"
        found = on_ranks(ranks, continued, tmp_path, start, place, settings)
        for loaded, _, _ in found if before else []:
            assert loaded.keys() == before.keys()
            assert all(np.array_equal(loaded[name], before[name]) for name in before)
        losses += found[0][1]
        start, before = (place, 2 * number + 3), found[0][2]
    with joined() as ranks, opened(ranks, tmp_path) as backend:
        unbroken = [step(backend, number + 1).loss for number in range(len(losses))]
    assert losses == pytest.approx(unbroken, rel=1e-6)


def answered_and_exported(folder, place):
    with joined() as ranks, opened(ranks, folder, **IN_LAYERS) as backend:
        step(backend, 1)
        backend.export(place)
        return backend.generate([[5, 6, 7], [8]], max_new_tokens=4), backend.eval_loss(
            batch_of(STEPS[0], place=backend.layout)
        )


@pytest.mark.parametrize("name", ["tied", "untied", "experts"])
def test_exports_and_answers_are_those_of_one_rank(name, tmp_path):
    if name == "experts":
        tiny("qwen3-moe").save_pretrained(save_tokenizer(tmp_path))
    else:
        save_model(tmp_path, vocabulary=96, tied=name == "tied")
    one, many = tmp_path / "one", tmp_path / "many"
    expected = answered_and_exported(tmp_path, one)
    for answers, evaluation in on_ranks(3, answered_and_exported, tmp_path, many):
        assert answers == expected[0]
        assert evaluation == pytest.approx(expected[1], rel=1e-5)
    assert sorted(f.name for f in many.iterdir()) == sorted(f.name for f in one.iterdir())
    ids = torch.arange(3, 23)[None]
    logits = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(input_ids=ids).logits for f in (one, many)]
    assert (logits[1] - logits[0]).norm() <= 1e-5 * logits[0].norm()


def refused(folder):
    """What is raised where one rank alone finds that segments are not kept apart."""
    with joined() as ranks:
        found = "rank 1 says so" if ranks.rank == 1 else ""
        with patch.object(backend_module, "isolation_problem", lambda *_, **__: found):
            try:
                with opened(ranks, folder):
                    return ""
            except BurnishError as error:
                return str(error)


def test_what_one_rank_finds_wrong_with_a_model_is_raised_on_all(folder):
    first, second = on_ranks(2, refused, folder)
    assert "rank 1 says so" in first
    assert first == second


def answered_by_two_minds(folder):
    """Answers where rank 1 by itself would always say the token after the likeliest."""
    with joined() as ranks, opened(ranks, folder) as backend:
        logits = backend._model.last_logits
        with patch.object(backend._model, "last_logits", lambda *a, **k: logits(*a, **k).roll(ranks.rank, -1)):
            return backend.generate([[5, 6, 7]], max_new_tokens=3)


def test_ranks_that_would_answer_otherwise_give_the_answer_of_the_first(folder):
    first, second = on_ranks(2, answered_by_two_minds, folder)
    assert first == second
    assert len(first[0]) == 3


def not_exported(folder, place):
    with joined() as ranks, opened(ranks, folder) as backend:
        try:
            return backend.export(place)
        except StorageError as error:
            return str(error)


def test_an_export_that_cannot_be_written_fails_on_all_ranks(folder, tmp_path):
    (tmp_path / "a file").touch()
    first, second = on_ranks(2, not_exported, folder, tmp_path / "a file" / "export")
    assert "could not be written" in first
    assert first == second


def saved_while_the_other_leaves(folder, place):
    with joined() as ranks, opened(ranks, folder) as backend:
        if ranks.rank == 1:
            return ""
        try:
            return backend.save(place).wait()
        except CheckpointError as error:
            return str(error)


def test_a_rank_that_is_gone_is_not_taken_for_a_full_disk(folder, tmp_path):
    said, _ = on_ranks(2, saved_while_the_other_leaves, folder, tmp_path / "backend")
    assert "backend: was not finished: lost contact with the other ranks (RuntimeError: " in said
    assert "disk" not in said
