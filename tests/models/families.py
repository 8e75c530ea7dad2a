"""Tiny models of several families, with random weights large enough that attention and caps are felt."""

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from burnish.models.attention import register
from burnish.models.load import blank_model
from burnish.models.weights import read_weights

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen2-windowed": lambda: Qwen2Config(**SHAPE, use_sliding_window=True, **WINDOWED),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "llama": lambda: LlamaConfig(**SHAPE),
    "smollm3": lambda: SmolLM3Config(**SHAPE, no_rope_layers=[1, 0]),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=4),
    "gemma2": lambda: Gemma2Config(
        **SHAPE, head_dim=8, **WINDOWED, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, head_dim=8, **WINDOWED),
    "cohere": lambda: CohereConfig(**SHAPE, logit_scale=0.25),
    "granite": lambda: GraniteConfig(**SHAPE, logits_scaling=4.0),
    "phi": lambda: PhiConfig(**SHAPE),
}


def tiny(family: str, *, seed: int = 0, **changes):
    """A float32 model of ``family`` with Burnish's attention, in evaluation mode."""
    config = FAMILIES[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    return build(config, seed=seed)


def build(config, *, seed: int = 0):
    """A model of ``config`` with weights drawn from ``seed``."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=register()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def load_model(path):
    """The model of ``path``, whole, on the CPU."""
    model = blank_model(str(path))
    read_weights(model, str(path), device=torch.device("cpu"), blank=lambda: blank_model(str(path)))
    return model
