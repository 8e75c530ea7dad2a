import numpy as np
import pytest
import torch
from transformers import GptOssConfig, Qwen3NextConfig, StableLmConfig

from burnish.errors import BurnishError
from burnish.models.attention import NAME, Segments, segment_attention
from burnish.models.loss import LossModel
from burnish.models.probe import head_problem, isolation_problem
from tests.models.families import FAMILIES, SHAPE, build, tiny

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
A, B, C = [5, 9, 11, 3, 40, 41, 42], [7, 8, 60, 61, 62], [33, 34, 35, 36, 37, 38, 39, 50, 51]


def logits(model, ids, segment_ids=None):
    segments = Segments.whole(len(ids), length=len(ids[0])) if segment_ids is None else Segments.of(segment_ids)
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(ids),
            position_ids=torch.from_numpy(segments.positions()),
            segments=segments,
            use_cache=False,
        ).logits


def test_runs_of_segment_ids_cover_the_row():
    segments = Segments.of(np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32))
    assert segments.rows == (((0, 2), (2, 5), (5, 6)), ((0, 6),))
    assert not segments.one_per_row
    assert segments.positions().tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("row", "alone"), [([1, 1, 0], True), ([0, 0, 0], True), ([1, 1, 1], True), ([0, 1, 1], False), ([1, 2, 2], False)]
)
def test_a_row_with_one_segment_at_its_start_is_known(row, alone):
    assert Segments.of(np.array([row], np.int32)).one_per_row is alone


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_padded_rows_equal_each_example_alone(family):
    model = tiny(family)
    packed = logits(model, [A + B + C + [2]], np.array([[1] * 7 + [2] * 5 + [3] * 9 + [0]], np.int32))[0]
    padded = logits(model, [A + [2] * 2, B + [2] * 4, C], np.array([[1] * 7 + [0] * 2, [1] * 5 + [0] * 4, [1] * 9]))
    model.set_attn_implementation("eager")
    for ids, own, other in zip((A, B, C), packed[:-1].split((7, 5, 9)), padded, strict=True):
        alone = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        torch.testing.assert_close(own, alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(other[: len(ids)], alone, rtol=1e-4, atol=1e-4)
    model.set_attn_implementation(NAME)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_pass_the_probe(family):
    model = LossModel(tiny(family), num_sources=1)
    assert head_problem(model, **CPU) == ""
    assert isolation_problem(model, **CPU) == ""


def test_a_window_is_felt():
    wide, narrow = tiny("mistral", sliding_window=64), tiny("mistral", sliding_window=4)
    assert (logits(wide, [C]) - logits(narrow, [C])).abs()[0, :4].max() == 0
    assert (logits(wide, [C]) - logits(narrow, [C])).abs()[0, 4:].max() > 1e-3


def test_a_leak_is_found(monkeypatch):
    monkeypatch.setattr(Segments, "of", classmethod(lambda cls, ids: cls.whole(len(ids), length=ids.shape[1])))
    assert "change the logits of the next" in isolation_problem(LossModel(tiny("qwen3"), num_sources=1), **CPU)


def test_a_head_that_cannot_be_reproduced_is_found():
    model = LossModel(tiny("cohere"), num_sources=1)
    del model.text_config["logit_scale"]
    model.head = model.head.of(model.text_config)
    assert "its logits are not its head" in head_problem(model, **CPU)


def test_layers_that_carry_state_are_refused_by_kind():
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
    problem = isolation_problem(LossModel(build(config), num_sources=1), **CPU)
    assert problem == "its linear_attention layers carry state from one segment into the next"


def test_attention_sinks_are_refused_by_name():
    config = GptOssConfig(**SHAPE, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(BurnishError, match="asks for s_aux"):
        logits(build(config), [A])


def test_a_mask_is_refused():
    q = torch.zeros(1, 1, 3, 4)
    with pytest.raises(BurnishError, match="asks for attention_mask"):
        segment_attention(torch.nn.Identity(), q, q, q, torch.ones(1), segments=Segments.whole(1, length=3))


def test_chunked_layers_are_refused_even_alone():
    model = LossModel(tiny("qwen3"), num_sources=1)
    model.text_config["layer_types"] = ["chunked_attention", "full_attention"]
    assert head_problem(model, **CPU) == "its chunked_attention layers are not plain causal attention"


def test_a_model_that_drops_arguments_is_refused_by_name():
    with pytest.raises(BurnishError, match=r"attention of StableLmAttention: .* does not hand the bounds"):
        logits(build(StableLmConfig(**SHAPE)), [A])
