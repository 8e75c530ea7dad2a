"""Weights into Megatron's model and out again, and its logits, on real ranks, against transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from burnish.backends.comm import joined
from burnish.backends.megatron.sizes import Sizes, size_problems
from burnish.errors import ConfigError
from tests.ranks import on_ranks

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
    from burnish.backends.megatron import cpu

    cpu.install()
    from burnish.backends.megatron import weights
    from burnish.backends.megatron.model import build_model, start, stop

    weights.FILE_BYTES = options.get("file_bytes", 4 * 2**30)
    dtype = options.get("dtype", torch.float32)
    config = AutoConfig.from_pretrained(model)
    with joined() as ranks:
        start(ranks, sizes, seed=0)
        try:
            models = build_model(
                config, sizes=sizes, dtype=dtype, recompute=options.get("recompute", False), extra={}
            )
            weights.load_weights(models, model, hf_config=config, sizes=sizes)
            weights.export_weights(models, out, ranks=ranks, hf_config=config, sizes=sizes, dtype=dtype)
            ranks.gather(None)
            return None if dtype != torch.float32 else _distance(models, load_file(model / "expected.tensors"), sizes)
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
    exported = {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}
    original = load_file(model / "model.safetensors")
    assert exported.keys() == original.keys()
    assert [n for n in original if not torch.equal(exported[n], original[n].to(options.get("dtype"))) ] == []
    assert max(d for d in distances if d is not None) < 1e-5
    stages = cut.get("pipeline", 1)
    assert sum(d is not None for d in distances) == ranks // stages


CASES = [
    (family, tied, 1, WHOLE)
    for family in FAMILIES for tied in (False, True)
]


@pytest.mark.parametrize(("family", "tied", "ranks", "cut"), CASES)
def test_there_and_back(tmp_path, family, tied, ranks, cut):
    checked(save_family(tmp_path / "model", family, tied=tied), tmp_path / "out", ranks, cut)
