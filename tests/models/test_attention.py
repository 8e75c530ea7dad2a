import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention
from transformers import GPT2Config, GptOssConfig, LlamaConfig, Qwen3NextConfig, StableLmConfig

from burnish.errors import BurnishError, ConfigError
from burnish.models.attention import NAMES, Segments, register, segment_attention
from burnish.models.kernels import Demand, Kernel, choose_kernel
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
    model.set_attn_implementation(NAMES[Kernel.SDPA])


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


SHAPES = Segments.of(np.array([[1] * 3 + [2] * 6 + [3] * 5 + [0] * 2, [1] * 11 + [0] * 5], np.int32))


def draw(*, heads=4, key_heads=2, width=16):
    random = torch.Generator().manual_seed(1)
    return [torch.randn(2, count, 16, width, generator=random) for count in (heads, key_heads, key_heads)]


def by_formula(query, key, value, *, scaling=None, window=None, softcap=None):
    """Softmax over the tokens that one sees, written out token by token."""
    output = torch.zeros(2, 16, 4, value.shape[-1])
    for row, spans in enumerate(SHAPES.rows):
        for start, stop in spans:
            for q, head in ((q, head) for q in range(start, stop) for head in range(4)):
                first = max(start, q + 1 - (window or 16))
                scores = key[row, head // 2, first : q + 1] @ query[row, head, q] * (scaling or 0.25)
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                output[row, q, head] = torch.softmax(scores, 0) @ value[row, head // 2, first : q + 1]
    return output


ASKED = [{}, {"scaling": 0.7}, {"window": 4}, {"softcap": 0.5}, {"window": 3, "softcap": 0.5, "scaling": 0.1}]


def attend(kernel, asked):
    settings = {"sliding_window" if key == "window" else key: value for key, value in asked.items()}
    layer = torch.nn.Identity()
    return segment_attention(layer, *draw(), None, segments=SHAPES, kernel=kernel, **settings)[0]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_sdpa_is_the_formula(asked):
    torch.testing.assert_close(attend(Kernel.SDPA, asked), by_formula(*draw(), **asked), rtol=1e-5, atol=1e-5)


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """Its forward runs on a CPU too, and without this switch warns that it is slow."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_flex_is_the_formula(asked):
    torch.testing.assert_close(attend(Kernel.FLEX, asked), by_formula(*draw(), **asked), rtol=1e-5, atol=1e-5)


def varlen_by_its_documentation(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert (cu_seq_q.dtype, max_q, window_size[1], enable_gqa) == (torch.int32, 11, 0, True)
    assert torch.equal(cu_seq_q, cu_seq_k)
    output = torch.empty_like(query)
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        ones = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        seen = ones if window_size[0] < 0 else ones.triu(-window_size[0])
        q, k, v = (x[None, start:stop].transpose(1, 2) for x in (query, key, value))
        part = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        output[start:stop] = part[0].transpose(0, 1)
    return output


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_flash_is_handed_what_its_documentation_says(asked, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_its_documentation)
    torch.testing.assert_close(attend(Kernel.FLASH, asked), by_formula(*draw(), **asked), rtol=1e-5, atol=1e-5)


GPU = {"device_type": "cuda", "dtype": torch.bfloat16, "head_dim": 128}


@pytest.mark.parametrize(
    ("demand", "kernel"),
    [
        ({}, Kernel.FLASH),
        ({"softcap": True}, Kernel.FLEX),
        ({"dtype": torch.float32}, Kernel.FLEX),
        ({"head_dim": 512}, Kernel.FLEX),
        ({"head_dim": 20}, Kernel.FLEX),
        ({"has_varlen": False}, Kernel.FLEX),
        ({"dropout": True}, Kernel.SDPA),
        ({"device_type": "cpu"}, Kernel.SDPA),
        ({"device_type": "cpu", "softcap": True}, Kernel.SDPA),
    ],
    ids=str,
)
def test_the_fastest_kernel_that_can_is_chosen(demand, kernel):
    assert choose_kernel("auto", Demand(**GPU | demand)) is kernel


def test_a_kernel_that_is_named_is_taken_or_refused():
    assert choose_kernel("sdpa", Demand(**GPU)) is Kernel.SDPA
    assert choose_kernel("flex", Demand(**GPU)) is Kernel.FLEX
    with pytest.raises(ConfigError, match=r"model\.attention='flash': cannot bound scores"):
        choose_kernel("flash", Demand(**GPU, softcap=True))
    with pytest.raises(ConfigError, match=r"model\.attention='flex': needs a CUDA GPU, and this run computes on cpu"):
        choose_kernel("flex", Demand(**GPU | {"device_type": "cpu"}))


def test_what_a_model_demands_is_in_its_config():
    facts = {"device_type": "cpu", "dtype": torch.float32}
    assert Demand.of(FAMILIES["gemma2"](), **facts) == Demand(**facts, head_dim=8, softcap=True)
    assert Demand.of(FAMILIES["llama"](), **facts) == Demand(**facts, head_dim=8)
    assert Demand.of(LlamaConfig(**SHAPE, attention_dropout=0.1), **facts).dropout
    assert Demand.of(GPT2Config(n_embd=32, n_head=2), **facts).head_dim == 16


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_the_probe_passes_with_flex_and_leaves_it(family):
    model = LossModel(tiny(family), num_sources=1)
    model.model.set_attn_implementation(register(Kernel.FLEX))
    assert head_problem(model, **CPU) == ""
    assert isolation_problem(model, **CPU) == ""
    assert model.model.config._attn_implementation == NAMES[Kernel.FLEX]
