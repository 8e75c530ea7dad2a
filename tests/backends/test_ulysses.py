"""Ranks that hold a part each of the same rows train as one rank does with whole rows."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention
from transformers import Qwen3NextConfig

from burnish.backends.comm import joined
from burnish.backends.fsdp import ulysses
from burnish.backends.fsdp.ulysses import SequenceExchange
from burnish.errors import BurnishError
from burnish.models.attention import Segments, segment_attention
from burnish.models.kernels import Kernel
from tests.backends.steps import batch_of, draw, example, opened, place_of
from tests.models.families import FAMILIES, SHAPE, build, tiny
from tests.ranks import on_ranks
from tests.toys import save_tokenizer

# The last has an example without targets, and one shorter than the ranks are many.
STEPS = [draw(0), draw(1), [*draw(2), example([7, 8, 9], [0, 0, 0]), example([5, 6], [0, 1])]]
MODELS = {**{family: (family, {}) for family in FAMILIES}, "one key head": ("qwen3", {"num_key_value_heads": 1})}
ON_TWO = ("qwen2", "qwen3-moe", "smollm3", "mistral", "gemma3", "phi", "one key head")
ON_FOUR = (("qwen3", 2), ("qwen3", 4), ("one key head", 4), ("gemma2", 2), ("gemma2", 4))


def trained(folder, share=1, layout=None, settings=None):
    """What a rank has after three steps, an evaluation and an answer."""
    base = {"num_steps": 10, "num_sources": 2, "learning_rate": 1e-3, "eps": 1e-6}
    with opened(folder, share=share, **base, **(settings or {})) as backend:
        batches = [
            batch_of(rows, step=step, place=backend.layout, **(layout or {})) for step, rows in enumerate(STEPS, 1)
        ]
        results = [backend.train_step(batch) for batch in batches]
        return {
            "numbers": [number for r in results for number in (*r.loss_sums, r.grad_norm)],
            "targets": [r.num_targets for r in results],
            "seed of dropout": torch.initial_seed(),
            "weights": {name: p.detach().full_tensor().numpy() for name, p in backend._parameters.items()},
            "evaluation": backend.eval_loss(batches[2]),
            "answer": backend.generate([[5, 6, 7]], max_new_tokens=4),
        }


def assert_as_one_rank(ranks, one):
    for got in ranks:
        assert got["numbers"] == pytest.approx(one["numbers"], rel=1e-5)
        assert (got["targets"], got["answer"]) == (one["targets"], one["answer"])
        assert got["evaluation"] == pytest.approx(one["evaluation"], rel=1e-5)
        for name, weight in one["weights"].items():
            assert np.linalg.norm(got["weights"][name] - weight) <= 1e-4 * np.linalg.norm(weight), name


def save(model, folder):
    model.save_pretrained(folder)
    return save_tokenizer(folder)


def save_named(name, folder):
    family, changes = MODELS[name]
    return save(tiny(family, **changes), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3 of four heads and two key heads."""
    return save(tiny("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def one(folder):
    return trained(folder)


@pytest.mark.parametrize("model", ON_TWO)
def test_two_ranks(tmp_path, model):
    save_named(model, tmp_path)
    assert_as_one_rank(on_ranks(2, trained, tmp_path, 2), trained(tmp_path))


@pytest.mark.parametrize(("model", "share"), ON_FOUR)
def test_four_ranks(tmp_path, model, share):
    """Rows of one example; of two data ranks one has a filler row."""
    save_named(model, tmp_path)
    layout = {"micro_batch_size": 1}
    assert_as_one_rank(on_ranks(4, trained, tmp_path, share, layout), trained(tmp_path))


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ({"layout": "packed"}, {}),
        ({"layout": "padded", "micro_batch_size": 5}, {}),
        ({"layout": "packed"}, {"activation_checkpointing": True}),
    ],
    ids=str,
)
def test_layouts(folder, one, layout, settings):
    assert_as_one_rank(on_ranks(2, trained, folder, 2, layout, settings), one)


def test_each_rank_drops_out_for_itself(tmp_path):
    save(tiny("qwen3", attention_dropout=0.5), tmp_path)
    first, second = on_ranks(2, trained, tmp_path, 2)
    assert first["seed of dropout"] != second["seed of dropout"]
    assert first["numbers"] == second["numbers"]


SEGMENTS = Segments.of(np.array([[1] * 5 + [2] * 4 + [3] * 6 + [0], [1] * 13 + [0] * 3], np.int32))


def attention(kernel, key_heads):
    """(Of whole rows, from parts of them): what a rank holds of the output."""
    with joined("cpu") as ranks, patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
        exchange = SequenceExchange.between(ranks, layout=place_of(ranks.rank, ranks.world_size, share=2))
        random, held = torch.Generator().manual_seed(0), exchange.part(16)
        whole = [torch.randn(2, n, 16, w, generator=random) for n, w in ((4, 16), (key_heads, 16), (key_heads, 24))]
        ask = {"attention_mask": None, "sliding_window": 4, "kernel": kernel}
        layer = torch.nn.Identity()
        expected = segment_attention(layer, *whole, segments=SEGMENTS, **ask)[0][:, held]
        parts = [x[:, :, held] for x in whole]
        got = segment_attention(layer, *parts, segments=replace(SEGMENTS, exchange=exchange), **ask)[0]
        return expected.numpy(), got.numpy()


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("kernel", [Kernel.SDPA, Kernel.FLEX])
def test_every_kernel_sees_whole_rows(kernel, key_heads):
    for expected, got in on_ranks(2, attention, kernel, key_heads):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def with_positions_of_the_first_part(folder):
    positions = Segments.positions

    def of_first(self):
        whole = positions(self)
        return whole if self.exchange is None else np.tile(whole[:, : whole.shape[1] // 2], 2)

    with patch.object(Segments, "positions", of_first):
        return trained(folder, 2)


def without_the_way_back(folder):
    with patch.object(ulysses._AllToAll, "backward", staticmethod(lambda ctx, gradient: (gradient, None))):
        return trained(folder, 2)


@pytest.mark.parametrize("fault", [with_positions_of_the_first_part, without_the_way_back])
def test_planted_faults_are_caught(folder, one, fault):
    ranks = on_ranks(2, fault, folder)
    with pytest.raises(AssertionError):
        assert_as_one_rank(ranks, one)


def without_an_exchange(folder):
    kept = {"whole_rows": lambda self, *tensors: tensors, "own_part": lambda self, output: output}
    with patch.multiple(SequenceExchange, **kept):
        trained(folder, 2)


def test_parts_that_do_not_meet_are_found_at_the_start(folder):
    with pytest.raises(BurnishError, match=r"ranks cannot share its rows: .*other parts do not reach its logits"):
        on_ranks(2, without_an_exchange, folder)


def test_layers_that_carry_state_are_refused(tmp_path):
    config = Qwen3NextConfig(
        **SHAPE,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )
    save(build(config), tmp_path)
    with pytest.raises(BurnishError, match="ranks cannot share its rows"):
        on_ranks(2, trained, tmp_path, 2, {"layout": "padded"}, {"share_rows": False})
