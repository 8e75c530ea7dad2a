"""The verbs of the Megatron backend on real ranks: refusals, what is skipped, what is never decayed."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from burnish.backends.megatron.layout import layout_of
from burnish.backends.megatron.sizes import Sizes
from burnish.data.packing import round_up
from burnish.errors import BurnishError, ConfigError
from burnish.models.loss import Objective
from tests.backends.megatron_runs import LR, PAD, on_megatron, opened, run, step_rows, train
from tests.backends.steps import batch_of, reference_run
from tests.backends.steps import opened as opened_fsdp
from tests.backends.test_megatron_weights import save_family
from tests.ranks import on_ranks
from tests.toys import save_model, save_tokenizer

TP2, PP2 = {"tensor": 2}, {"pipeline": 2}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), vocabulary=97)


@pytest.fixture(scope="module")
def reference(model_dir):
    losses, norms, _ = reference_run(model_dir, [step_rows(number) for number in range(5)], lr=LR)
    return losses, norms


def spoiled(model_dir, sizes):
    """Of a step with a weight that is not a number on one rank: skipped, and whether other weights stayed."""
    with opened(model_dir, sizes=sizes) as backend:
        if torch.distributed.get_rank() == 0:
            next(backend._models[0].parameters()).data.fill_(float("nan"))
        before = [p.detach().clone() for p in backend._models[0].parameters()]
        result = backend.train_step(batch_of(step_rows(0), place=backend.layout))
        same = all(
            torch.equal(a, b) for a, b in zip(before[1:], list(backend._models[0].parameters())[1:], strict=True)
        )
        return result.skipped, same


def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(model_dir):
    assert on_megatron(2, spoiled, model_dir, Sizes(**PP2)) == [(True, True)] * 2


def decays(model_dir):
    """(dimensions, decay) of every parameter."""
    with opened(model_dir, weight_decay=0.1) as backend:
        (part,) = backend._optimizer.parts
        found = set()
        for model in backend._models:
            for parameter in model.parameters():
                group, _ = part.model_param_group_index_map[parameter]
                found.add((parameter.ndim, part.optimizer.param_groups[group]["weight_decay"]))
        return sorted(found)


def test_norms_are_not_decayed(model_dir):
    assert on_megatron(1, decays, model_dir) == [[(1, 0.0), (2, 0.1)]]


OBJECTIVE = Objective(label_smoothing=0.1, z_loss=1e-3)


def smoothed(model_dir, sizes):
    with opened(model_dir, sizes=sizes, objective=OBJECTIVE) as backend:
        return train(backend, range(3), "shared")


def smoothed_by_fsdp(model_dir):
    settings = {"learning_rate": LR, "eps": 1e-6, "schedule": "constant", "objective": OBJECTIVE}
    with opened_fsdp(model_dir, num_steps=10, num_sources=2, **settings) as backend:
        return train(backend, range(3), "shared")


def test_smoothing_and_z_loss_are_those_of_fsdp(model_dir):
    ((losses, norms),) = on_ranks(1, smoothed_by_fsdp, model_dir)
    for found, found_norms in on_megatron(2, smoothed, model_dir, Sizes(**TP2)):
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)


def asked(model_dir, settings):
    try:
        with opened(model_dir, **settings):
            return "nothing"
    except ConfigError as error:
        return [(problem.key, problem.message) for problem in error.problems]
    except BurnishError as error:
        return str(error)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "lion"}, "there is no such optimizer"),
        ({"optimizer_config_kwargs": {"lr": 1.0}}, "is decided by optimizer_config"),
        ({"optimizer_config_kwargs": {"use_distributed_optimizer": False}}, "is always true"),
        ({"optimizer_config_kwargs": {"optimizer_cpu_offload": True}}, "is not built"),
        ({"optimizer_config_kwargs": {"adam_beta": 1.0}}, "Megatron has no such key"),
        ({"optimizer_config_kwargs": {"main_params_dtype": "half"}}, "can only be fp32"),
        ({"transformer_config_kwargs": {"num_layer": 1}}, "no such field"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(model_dir, settings, said):
    (found,) = on_megatron(1, asked, model_dir, settings)
    assert said in str(found)


PROMPTS = [[5, 9, 30], [7], [40, 41, 50, 60, 12]]
CUTS = {
    "TP2+SP": (2, {"tensor": 2, "sequence_parallel": True}),
    "PP2": (2, PP2),
    "CP2": (2, {"context": 2}),
    "VP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "TP2 CP2": (4, {"tensor": 2, "context": 2}),
}


@pytest.fixture(scope="module")
def deep_dir(tmp_path_factory):
    """Four layers, that two stages may hold two parts each."""
    return save_tokenizer(save_family(tmp_path_factory.mktemp("deep"), "llama"))


def answers_of(model_dir, sizes):
    with opened(model_dir, sizes=sizes) as backend:
        train(backend, range(2), "shared")
        return backend.generate(PROMPTS, max_new_tokens=5)


def answers_of_fsdp(model_dir):
    with opened_fsdp(
        model_dir, learning_rate=LR, num_steps=10, num_sources=2, eps=1e-6, schedule="constant"
    ) as backend:
        for number in range(2):
            backend.train_step(batch_of(step_rows(number), step=number + 1, place=backend.layout))
        return backend.generate(PROMPTS, max_new_tokens=5)


@pytest.mark.parametrize("cut", CUTS)
def test_answers_are_those_of_fsdp_however_the_model_is_cut(deep_dir, cut):
    number, sizes = CUTS[cut]
    (expected,) = on_ranks(1, answers_of_fsdp, deep_dir)
    assert on_megatron(number, answers_of, deep_dir, Sizes(**sizes)) == [expected] * number


def held(parts):
    """Of a row with three segments, padded: the bounds, and what each part holds."""
    from burnish.backends.megatron.thd import held_tokens, sequence_bounds

    ids = np.array([[1] * 5 + [0] * 3 + [2] * 16 + [3] * 1 + [0] * 15, [1] * 8 + [0] * 32], np.int32)
    bounds = sequence_bounds(ids, segment_multiple=8)
    return bounds.tolist(), [held_tokens(bounds, parts=parts, part=part).tolist() for part in range(parts)]


def test_every_token_is_held_once_and_every_rank_has_as_much_of_a_segment():
    ((bounds, parts),) = on_megatron(1, held, 4)
    assert bounds == [0, 8, 24, 32, 40, 48, 80]
    assert sorted(token for part in parts for token in part) == list(range(80))
    assert [part[:2] for part in parts] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert len({len(part) for part in parts}) == 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("context", [1, 2, 4])
def test_rows_can_be_shared_as_the_sizes_ask(context, sequence_parallel):
    sizes = Sizes(tensor=2, context=context, pipeline=2, sequence_parallel=sequence_parallel)
    world = 2 * sizes.devices_per_replica
    layouts = [layout_of(sizes, rank=rank, world_size=world) for rank in range(world)]
    assert [layouts[0].data_size, layouts[-1].data_rank] == [2, 1]
    # Ranks of a stage that share matrices and rows lie next to each other.
    assert [layout.data_rank for layout in layouts[: 2 * 2 * context]] == [0] * 2 * context + [1] * 2 * context
    row = round_up(2 * context + 1, layouts[0].row_multiple)
    assert row % context == 0
    assert not sequence_parallel or row // context % 2 == 0


def test_recomputed_layers_change_no_number(model_dir, reference):
    kwargs = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    (result,) = run(model_dir, Sizes(), ranks=1, transformer_config_kwargs=kwargs)
    assert result["losses"] == pytest.approx(reference[0][:3], rel=1e-5)
    assert result["norms"] == pytest.approx(reference[1][:3], rel=1e-5)


def warned(sizes):
    """What is said of the cost of rows, here and as if there were a GPU without Transformer Engine."""
    from burnish.backends.megatron.spec import cost_without_engine

    here = cost_without_engine(sizes)
    with patch.object(torch.cuda, "is_available", lambda: True):
        return here, cost_without_engine(sizes)


def test_a_gpu_without_transformer_engine_is_warned_of():
    ((here, alone),) = on_megatron(1, warned, Sizes())
    ((_, shared),) = on_megatron(1, warned, Sizes(context=2))
    assert here == ""
    assert "one call a segment" in alone
    assert "keys and values of whole rows" not in alone
    assert "keys and values of whole rows" in shared


DROPPING = {"transformer_config_kwargs": {"hidden_dropout": 0.2}}


def dropping(model_dir, sizes, folder, resuming):
    """Losses of steps 3 and 4, of a run that has gone through or of one that goes on from where that was saved."""
    with opened(model_dir, sizes=sizes, **DROPPING) as backend:
        if resuming:
            backend.load(folder)
        else:
            train(backend, range(3), "shared")
            backend.save(folder).wait()
        return train(backend, range(3, 5), "shared")[0]


def test_dropout_depends_on_the_step_and_not_on_what_was_before(model_dir, reference, tmp_path):
    sizes = Sizes(tensor=2, pipeline=2, sequence_parallel=True)
    whole = on_megatron(4, dropping, model_dir, sizes, tmp_path / "save", False)
    assert on_megatron(4, dropping, model_dir, sizes, tmp_path / "save", True) == whole
    assert whole[0] != pytest.approx(reference[0][3:], rel=1e-3), "something is dropped"


def low_precision(model_dir, sizes):
    with opened(model_dir, sizes=sizes, dtype="bfloat16") as backend:
        losses, _ = train(backend, range(3), "shared")
        masters = {master.dtype for part in backend._optimizer.parts for master in part.get_parameters()}
        sums = {p.main_grad.dtype for model in backend._models for p in model.parameters()}
        return losses, sorted(map(str, masters | sums))


def test_bfloat16_has_float32_masters_and_sums(model_dir, reference):
    for losses, formats in on_megatron(2, low_precision, model_dir, Sizes()):
        assert losses == pytest.approx(reference[0][:3], rel=0.02)
        assert formats == ["torch.float32"]


def test_the_padding_token_is_among_the_targets():
    assert PAD in step_rows(0)[-1].input_ids
