"""Weights into Megatron's model and out again, and its logits, on real ranks, against transformers."""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from burnish.backends.comm import joined
from burnish.backends.megatron import cpu
from burnish.backends.megatron.sizes import Sizes, size_problems
from burnish.errors import ConfigError, LaunchError
from burnish.models.load import export_configs
from tests.backends.megatron_runs import ALL
from tests.ranks import on_ranks
from tests.toys import save_tokenizer

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 32,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
SOME_WINDOWED = ["sliding_attention", "full_attention"] * 2
FAMILIES = {
    "llama": lambda **more: LlamaConfig(**SHAPE, **more),
    "llama-biased": lambda **more: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, **more),
    "llama-3.1": lambda **more: LlamaConfig(**SHAPE, rope_parameters=LLAMA3, **more),
    "mistral": lambda **more: MistralConfig(**SHAPE, sliding_window=5, **more),
    "qwen2": lambda **more: Qwen2Config(**SHAPE, **more),
    "qwen2-windowed": lambda **more: Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=5, layer_types=SOME_WINDOWED, **more
    ),
    "qwen3": lambda **more: Qwen3Config(**SHAPE, head_dim=16, **more),
    "qwen3-moe": lambda **more: Qwen3MoeConfig(**SHAPE, **MOE, norm_topk_prob=True, mlp_only_layers=[1], **more),
    "qwen3-moe-raw": lambda **more: Qwen3MoeConfig(**SHAPE, **MOE, norm_topk_prob=False, decoder_sparse_step=2, **more),
}
SEGMENTS = (8, 24, 16)
"""Tokens of the segments of the one row; multiples of what four ranks that share it need."""
WHOLE, TP2, PP2, CP2, EP2 = {}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}, {"expert": 2}
SP2 = {"tensor": 2, "sequence_parallel": True}
VP2 = {"pipeline": 2, "virtual_pipeline": 2}


def save_family(folder: Path, family: str, *, tied: bool = False, **more) -> Path:
    """A model with weights that all matter, and the logits of :data:`SEGMENTS`, each alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        FAMILIES[family](tie_word_embeddings=tied, **more), dtype=torch.float32, attn_implementation="sdpa"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, sum(SEGMENTS)))
    with torch.no_grad():
        logits = [model(segment, use_cache=False).logits for segment in ids.split(SEGMENTS, dim=1)]
    save_file({"ids": ids, "logits": torch.cat(logits, dim=1)}, folder / "expected.tensors")
    return folder


def there_and_back(model: Path, out: Path, sizes: Sizes, options: dict) -> float | None:
    """Load, export, and the greatest distance of this rank's logits from the expected; of the last stage alone."""
    with loaded(model, sizes, **options) as (ranks, models, weights, settings):
        dtype = options.get("dtype", torch.float32)
        weights.export_weights(models, out, ranks=ranks, dtype=dtype, **settings)
        ranks.gather(None)
        return _distance(models, load_file(model / "expected.tensors"), sizes) if options.get("logits", True) else None


@contextmanager
def loaded(model: Path, sizes: Sizes, *, dtype=torch.float32, file_bytes=4 * 2**30, logits=True):
    """What is called with the models of this rank: the ranks, the models, the module of the weights and its settings."""
    cpu.install()
    from burnish.backends.megatron import weights
    from burnish.backends.megatron.model import build_model, start, stop

    weights.FILE_BYTES = file_bytes
    config = AutoConfig.from_pretrained(model)
    with joined() as ranks:
        start(ranks, sizes, seed=0)
        try:
            models = build_model(config, sizes=sizes, dtype=dtype, extra={})
            weights.load_weights(models, model, hf_config=config, sizes=sizes)
            yield ranks, models, weights, {"hf_config": config, "sizes": sizes}
        finally:
            stop()


def _distance(models, expected, sizes):
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    rank, found = parallel_state.get_context_parallel_rank(), []
    chunks = [s.chunk(2 * sizes.context) for s in torch.arange(sum(SEGMENTS)).split(SEGMENTS)]
    held = torch.cat([torch.cat([c[rank], c[-1 - rank]]) if sizes.context > 1 else torch.cat(c) for c in chunks])
    cuts = torch.tensor([0, *SEGMENTS]).cumsum(0).int()
    bounds = {"cu_seqlens_q": cuts, "cu_seqlens_kv": cuts, "max_seqlen_q": 24, "max_seqlen_kv": 24}

    def forward(data, model):
        packed = PackedSeqParams(qkv_format="thd", **bounds)
        output = model(next(data)[:, held], None, None, packed_seq_params=packed)
        return output, lambda logits: (logits.sum(), logits.shape[0], found.append(logits))

    for model in models:
        model.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter([expected["ids"]] * sizes.pipeline) for _ in models],
            model=models,
            num_microbatches=sizes.pipeline,
            seq_length=sum(SEGMENTS),
            micro_batch_size=1,
            forward_only=True,
        )
    if not found:
        return None
    logits = gather_from_tensor_model_parallel_region(found[0])[..., : SHAPE["vocab_size"]]
    return (logits - expected["logits"][:, held]).abs().max().item()


def checked(model: Path, out: Path, ranks: int, cut: dict, **options) -> None:
    """The exported weights are those of ``model``, bit for bit, and the logits are right."""
    distances = on_ranks(ranks, there_and_back, model, out, Sizes(**cut), options, pool="megatron")
    assert_same_weights(out, model, dtype=options.get("dtype", torch.float32))
    if options.get("logits", True):
        assert max(d for d in distances if d is not None) < 1e-5
        assert sum(d is not None for d in distances) == ranks // cut.get("pipeline", 1)


def assert_same_weights(out: Path, model: Path, *, dtype=torch.float32) -> None:
    exported = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    original = load_file(model / "model.safetensors")
    assert exported.keys() == original.keys()
    assert [name for name in original if not torch.equal(exported[name], original[name].to(dtype))] == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_and_computes_the_same(tmp_path, family, tied):
    checked(save_family(tmp_path / "model", family, tied=tied), tmp_path / "out", 1, WHOLE)


SOME_CUTS = [("qwen2", 2, TP2), ("qwen3", 2, VP2), ("qwen3-moe", 2, EP2)]
CUTS = [
    *SOME_CUTS,
    ("qwen2", 2, SP2),
    ("llama-biased", 2, SP2),
    ("qwen3", 2, PP2),
    ("llama", 4, TP2 | PP2),
    ("llama", 4, SP2 | VP2),
    ("llama", 4, {"tensor": 4}),  # more ranks than key heads
    ("qwen2-windowed", 2, CP2),
    ("mistral", 4, {"context": 4}),
    ("llama", 2, WHOLE),
    ("qwen3-moe", 2, SP2),
    ("qwen3-moe", 4, PP2 | EP2),
    ("qwen3", 8, SP2 | PP2 | CP2),
]


@pytest.mark.parametrize(("family", "ranks", "cut"), CUTS if ALL else SOME_CUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_cut_comes_back_and_computes_the_same(tmp_path, family, tied, ranks, cut):
    checked(save_family(tmp_path / "model", family, tied=tied), tmp_path / "out", ranks, cut)


def test_experts_and_matrices_shared_at_once_come_back(tmp_path):
    # Gloo cannot compute it.
    model = save_family(tmp_path / "model", "qwen3-moe")
    checked(model, tmp_path / "out", 4, SP2 | EP2, logits=False)


@pytest.mark.parametrize("cut", [WHOLE, TP2 | PP2])
def test_half_precision_is_rounded_once(tmp_path, cut):
    model = save_family(tmp_path / "model", "qwen3")
    checked(model, tmp_path / "out", 4 if cut else 1, cut, dtype=torch.bfloat16, logits=False)


def test_a_large_export_is_files_with_an_index(tmp_path):
    model, out = save_family(tmp_path / "model", "llama"), tmp_path / "out"
    checked(model, out, 2, PP2, file_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    assert {n: load_file(out / f).keys() >= {n} for n, f in index["weight_map"].items()} == dict.fromkeys(
        load_file(model / "model.safetensors"), True
    )
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load_file(model / "model.safetensors").values())


@pytest.mark.parametrize("file_bytes", [20_000, 4 * 2**30])
def test_transformers_computes_the_same_of_an_export(tmp_path, file_bytes):
    model, out = save_family(tmp_path / "model", "qwen2", tied=True), tmp_path / "out"
    checked(model, out, 4, TP2 | PP2, file_bytes=file_bytes)
    export_configs(
        out,
        model=AutoModelForCausalLM.from_pretrained(model),
        dtype=torch.float32,
        tokenizer=AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "tokenizer")),
    )
    expected = load_file(model / "expected.tensors")
    first = SEGMENTS[0]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out)(expected["ids"][:, :first]).logits
    torch.testing.assert_close(logits, expected["logits"][:, :first], atol=1e-6, rtol=0)


def places(model: Path, sizes: Sizes) -> list[tuple[str, bool]]:
    """Of each parameter that Transformer Engine names otherwise, whether it comes from the same stored tensors."""
    with loaded(model, sizes) as (_, models, weights, settings):
        found = []
        for name, value in models[0].named_parameters():
            own = name.partition("decoder.layers.0.")[2]
            of_engine = re.sub(r"experts\.local_experts\.(\d+)\.(\w+)\.weight", r"experts.\2.weight\1", own)
            of_engine = ENGINE.get(of_engine, of_engine)
            if own != of_engine:
                here, there = (weights.placed("model.layers.0.", n, value=value, **settings) for n in (own, of_engine))
                found.append((own, here.shares == there.shares))
        return found


ENGINE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def test_names_of_transformer_engine_are_known(tmp_path):
    [found] = on_ranks(1, places, save_family(tmp_path / "model", "qwen3-moe"), Sizes(), pool="megatron")
    assert len(found) == 2 + 2 * MOE["num_experts"]
    assert all(same for _, same in found)


def test_weights_of_another_model_are_refused(tmp_path):
    def spoilt(**changed):
        folder = save_family(tmp_path / str(len(list(tmp_path.iterdir()))), "llama", tied="lm_head.weight" in changed)
        tensors = load_file(folder / "model.safetensors") | changed
        save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})
        return folder

    name = "model.layers.1.mlp.up_proj.weight"
    for folder, message in (
        (spoilt(**{name: None}), f"its weights lack {name}"),
        (spoilt(**{name: torch.zeros(40, 32)}), rf"its {name} is \[40, 32\], and by its config.json \[48, 32\]"),
        (spoilt(**{"lm_head.weight": torch.zeros(97, 32)}), "but both are stored and differ"),
    ):
        with pytest.raises(ConfigError, match=message):
            on_ranks(1, there_and_back, folder, tmp_path / "out", Sizes(), {}, pool="megatron")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "its hidden_act of gelu"),
        ("qwen2", {"attention_dropout": 0.1}, "its attention_dropout of 0.1"),
        ("llama", {"rope_parameters": LLAMA3 | {"rope_type": "yarn"}}, "its rope_type of yarn"),
        ("llama", {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}}, "its partial_rotary_factor of 0.5"),
        ("llama", {"attention_bias": True}, "its attention_bias of True"),
        ("qwen3", {"attention_bias": True}, "its attention_bias of True"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(family, changes, message):
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    [problem] = size_problems(config, Sizes())
    assert problem.key == "model.path"
    assert message in problem.message


def test_another_family_is_refused_with_those_that_can_be_built():
    [problem] = size_problems(GemmaConfig(), Sizes())
    assert "model_type gemma" in problem.message
    assert "llama, mistral, qwen2, qwen3, qwen3_moe" in problem.message


@pytest.mark.parametrize(
    ("family", "cut", "message"),
    [
        ("llama", {"tensor": 3}, "does not divide the model's 4 attention heads"),
        ("qwen3-moe", {"tensor": 32, "sequence_parallel": True}, "16 features between the matrices of an expert"),
        ("llama", {"pipeline": 3}, "does not divide the model's 4 layers"),
        ("llama", {"pipeline": 2, "virtual_pipeline": 4}, "times 2 stages is 8 parts"),
        ("llama", EP2, "the model has no experts"),
        ("qwen3-moe", {"expert": 3}, "does not divide the model's 4 experts"),
        ("qwen3-moe", TP2, "has to be 2, the tensor parallel size"),
        ("qwen3-moe", SP2 | EP2, "gloo gathers equal numbers"),
    ],
)
def test_sizes_that_do_not_fit_are_told_with_the_numbers(family, cut, message):
    problems = size_problems(FAMILIES[family](), Sizes(**cut), on_cpu=True)
    assert any(message in problem.message for problem in problems)


def test_sizes_that_fit_have_no_problem():
    for family, cut in (("llama", {"tensor": 4}), ("qwen2", TP2 | VP2 | CP2), ("qwen3-moe", EP2), ("qwen3-moe", SP2)):
        assert size_problems(FAMILIES[family](), Sizes(**cut), on_cpu=True) == []


def test_key_heads_neither_divided_nor_multiplied():
    config = LlamaConfig(**SHAPE | {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48})
    [problem] = size_problems(config, Sizes(tensor=4))
    assert "neither divides the model's 6 key heads nor is a multiple" in problem.message


def unknown_field(model: Path) -> str:
    cpu.install()
    from burnish.backends.megatron.model import transformer_config

    config = AutoConfig.from_pretrained(model)
    settings = {"sizes": Sizes(), "dtype": torch.float32}
    assert transformer_config(config, extra={"layernorm_epsilon": 0.5}, **settings).layernorm_epsilon == 0.5
    messages = []
    for extra in ({"no_such": 1}, {"recompute_granularity": "some"}):
        with pytest.raises(ConfigError) as caught:
            transformer_config(config, extra=extra, **settings)
        messages.append(str(caught.value))
    return "".join(messages)


def test_fields_of_megatron_are_passed_on_and_others_named(tmp_path):
    [messages] = on_ranks(1, unknown_field, save_family(tmp_path / "model", "llama"), pool="megatron")
    assert "transformer_config_kwargs.no_such=1: there is no such field" in messages
    assert "recompute_granularity" in messages


def test_the_stand_in_is_refused_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(LaunchError, match="there is a GPU on this machine"):
        cpu.install()
