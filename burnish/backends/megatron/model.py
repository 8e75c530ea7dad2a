"""A config of ``transformers`` becomes Megatron's GPT model, cut as asked; this rank's share of it.

Its rule: the same numbers as ``transformers``, or a refusal (:mod:`burnish.backends.megatron.sizes`).
"""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from burnish.backends.comm import Ranks, claim
from burnish.backends.megatron.sizes import Sizes, has_experts, size_problems, window_of
from burnish.backends.megatron.spec import block_spec, has_transformer_engine
from burnish.backends.megatron.vision import Rotary
from burnish.errors import ConfigError, Problem
from burnish.models.rotary import rotary_frequencies

KWARGS = "megatron_config.transformer_config_kwargs"


def start(ranks: Ranks, sizes: Sizes, *, seed: int) -> None:
    """Give this rank its groups and its random numbers. Once a process, after its group was joined."""
    if sizes.tensor > 1:
        # Megatron counts on a GPU to begin in the order of the calls: messages before the matrices beside them.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    claim(ranks.device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop() -> None:
    """Leave the groups that :func:`start` made."""
    parallel_state.destroy_model_parallel()


def build_model(hf_config: Any, *, sizes: Sizes, dtype: torch.dtype, extra: Mapping[str, Any]) -> list[Any]:
    """This rank's parts of the model, without weights: one, or as many as ``sizes.virtual_pipeline``.

    Args:
        hf_config: of ``transformers``.
        sizes: those that :func:`start` was called with.
        dtype: of parameters and computation.
        extra: fields of Megatron's ``TransformerConfig``; they win over what the model asks for.

    Raises:
        ConfigError: the model cannot be built or cut so, or there is no such field.
    """
    config = transformer_config(hf_config, sizes=sizes, dtype=dtype, extra=extra)
    parts = [None] if sizes.virtual_pipeline is None else list(range(sizes.virtual_pipeline))
    return [_part(hf_config, config, sizes=sizes, part=part) for part in parts]


def transformer_config(hf_config: Any, *, sizes: Sizes, dtype: torch.dtype, extra: Mapping[str, Any]) -> Any:
    """Megatron's ``TransformerConfig``, as for :func:`build_model`.

    Raises:
        ConfigError: as there.
    """
    if problems := [*size_problems(hf_config, sizes), *_extra_problems(extra)]:
        raise ConfigError(problems)
    facts = hf_config.to_dict()
    settings = {**_shape(facts), **_experts(facts), **_cut(sizes, dtype), **_arithmetic()}
    if section := facts["rope_parameters"].get("mrope_section"):
        # Its kernel for packed rows begins anew in each sequence.
        settings |= {"mrope_section": section, "apply_rope_fusion": False}
    if settings["window_size"] and sizes.context > 1 and has_transformer_engine():
        message = "Transformer Engine does not share rows of a model with sliding windows"
        raise ConfigError(
            [
                Problem(
                    "megatron_config.context_parallel_size",
                    sizes.context,
                    message,
                    "leave it out, or use strategy=fsdp",
                )
            ]
        )
    try:
        return TransformerConfig(**{**settings, **extra})
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError([Problem(KWARGS, dict(extra), str(error), "give what Megatron Core accepts")]) from error


def _extra_problems(extra: Mapping[str, Any]) -> list[Problem]:
    known = {field.name for field in fields(TransformerConfig)}
    fix = "give a field of megatron.core.transformer.TransformerConfig"
    return [
        Problem(f"{KWARGS}.{name}", extra[name], "there is no such field", fix) for name in sorted({*extra} - known)
    ]


def _shape(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the model is."""
    layers, heads = facts["num_hidden_layers"], facts["num_attention_heads"]
    windows = [window_of(facts, layer) for layer in range(layers)]
    widest = next((window for window in windows if window is not None), None)
    return {
        "num_layers": layers,
        "hidden_size": facts["hidden_size"],
        "ffn_hidden_size": facts["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": facts["num_key_value_heads"],
        "kv_channels": facts.get("head_dim") or facts["hidden_size"] // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": facts["rms_norm_eps"],
        "qk_layernorm": facts["model_type"].startswith("qwen3"),
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": bool(facts.get("mlp_bias")),
        "add_qkv_bias": facts["model_type"].startswith("qwen2") or bool(facts.get("attention_bias")),
        # Megatron counts the tokens before one's own.
        "window_size": None if widest is None else (widest - 1, 0),
        "window_attn_skip_freq": [int(window is not None) for window in windows],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _experts(facts: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(facts["num_hidden_layers"])
    if not any(has_experts(facts, layer) for layer in layers):
        return {}
    return {
        "num_moe_experts": facts.get("num_local_experts") or facts["num_experts"],
        "moe_layer_freq": [int(has_experts(facts, layer)) for layer in layers],
        "moe_ffn_hidden_size": facts["moe_intermediate_size"],
        "moe_router_topk": facts["num_experts_per_tok"],
        # The chosen experts' shares sum to one if they are worked out after the choice.
        "moe_router_pre_softmax": not facts["norm_topk_prob"],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": has_transformer_engine(),
    }


def _cut(sizes: Sizes, dtype: torch.dtype) -> dict[str, Any]:
    """How the model is spread, and in what format."""
    return {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "sequence_parallel": sizes.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Micro-batches differ in length; interleaved, two stages would mix up whose length is whose, so there they do not.
        "variable_seq_lengths": sizes.pipeline > 1 and sizes.virtual_pipeline is None,
        # The default refuses that, experts or not.
        "moe_token_dispatcher_type": "alltoall",
    }


def _arithmetic() -> dict[str, Any]:
    """Sums, and not means of means; and the fused kernels that there are."""
    on_gpu, fused = torch.cuda.is_available(), has_transformer_engine()
    return {
        "calculate_per_token_loss": True,
        # Weights are read, not drawn.
        "init_method": _as_it_is,
        "output_layer_init_method": _as_it_is,
        "use_cpu_initialization": not on_gpu,
        "batch_p2p_comm": on_gpu,
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        "apply_rope_fusion": fused,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": fused,
    }


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _part(hf_config: Any, config: Any, *, sizes: Sizes, part: int | None) -> Any:
    model = GPTModel(
        config,
        block_spec(config, part=part),
        vocab_size=sizes.vocabulary(hf_config.vocab_size),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=part),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=part),
        position_embedding_type="mrope" if config.mrope_section else "rope",
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        vp_stage=part,
    )
    here = torch.cuda.current_device()
    if config.mrope_section:
        model.rotary_pos_emb = Rotary(hf_config, device=here)
    else:
        model.rotary_pos_emb.inv_freq = rotary_frequencies(hf_config).to(device=here)
    if model.pre_process and hf_config.pad_token_id is not None:
        model.embedding.word_embeddings.register_forward_hook(_without_gradient_of(hf_config.pad_token_id))
    return model.cuda(here)


def _without_gradient_of(pad_id: int) -> Any:
    """A hook on the embedding, which as in ``transformers`` learns nothing where it is given the token ``pad_id``.

    Models whose padding is also the end of a turn would train otherwise.
    """

    def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        is_pad = args[0] == pad_id
        if module.reduce_scatter_embeddings:
            is_pad = is_pad.t().chunk(module.tp_group.size())[module.tp_group.rank()]
        return torch.where(is_pad[..., None], output.detach(), output)

    return hook
