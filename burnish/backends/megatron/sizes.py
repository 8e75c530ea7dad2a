"""How a model is cut for Megatron Core, and whether it can be. No Megatron is imported to answer that.

Its rule: what this backend would compute otherwise than ``transformers`` is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burnish.errors import Problem

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""The ``model_type`` of what can be built; SmolLM and SmolLM2 are ``llama``."""
LANGUAGE = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")
"""Those of the language models of what takes images."""
ROTARY = ("default", "linear", "llama3")
"""Rotary positions whose frequencies do not depend on the length, nor scale the scores."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Ranks that share one thing each."""

    tensor: int = 1
    """Ranks that share each matrix."""
    pipeline: int = 1
    """Ranks that hold some of the layers each."""
    context: int = 1
    """Ranks that share each row."""
    expert: int = 1
    """Ranks that share the experts of a layer; they are taken from those that hold copies of the rest."""
    sequence_parallel: bool = False
    """Whether the ranks of ``tensor`` share a row between the matrices."""
    virtual_pipeline: int | None = None
    """Parts of the model that each rank of ``pipeline`` holds; None is one, and no interleaving."""

    @property
    def devices_per_replica(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    def vocabulary(self, num_tokens: int) -> int:
        """Rows of the embedding: those of ``num_tokens``, filled up so that all ranks of ``tensor`` hold as many."""
        return -(-num_tokens // self.tensor) * self.tensor


def size_problems(hf_config: Any, sizes: Sizes, *, on_cpu: bool = False) -> list[Problem]:
    """What keeps the model of ``hf_config`` (of ``transformers``) from being built and cut so; nothing, if it can be.

    Args:
        hf_config: its config.
        sizes: how it is cut.
        on_cpu: whether it is trained over gloo.
    """
    facts = hf_config.get_text_config().to_dict()
    if problems := _strange(facts):
        return problems
    return [
        *_tensor_problems(facts, sizes),
        *_pipeline_problems(facts, sizes),
        *_expert_problems(facts, sizes, on_cpu=on_cpu),
        *_image_problems(facts, hf_config.to_dict().get("vision_config"), sizes),
    ]


def window_of(facts: Mapping[str, Any], layer: int) -> int | None:
    """Tokens that one token sees in ``layer`` (0 is the first), itself included; None is all before it."""
    kinds = facts.get("layer_types")
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    window: int | None = facts.get("sliding_window")
    return window


def has_experts(facts: Mapping[str, Any], layer: int) -> bool:
    """Whether ``layer`` (0 is the first) is a mixture of experts."""
    return bool(
        facts["model_type"] == "qwen3_moe"
        and layer not in facts["mlp_only_layers"]
        and (layer + 1) % facts["decoder_sparse_step"] == 0
    )


def _strange(facts: Mapping[str, Any]) -> list[Problem]:
    """What of the model this backend does not compute."""
    kind = facts["model_type"]
    if kind not in (*FAMILIES, *LANGUAGE):
        message = f"model_type {kind} is not built by strategy=megatron, which builds {', '.join(FAMILIES)}"
        return [Problem("model.path", kind, message, "use strategy=fsdp")]
    rope = facts.get("rope_parameters") or {}
    attention_bias, mlp_bias = (bool(facts.get(name, False)) for name in ("attention_bias", "mlp_bias"))
    asked = {
        "hidden_act": (facts["hidden_act"], facts["hidden_act"] == "silu"),
        "attention_dropout": (facts["attention_dropout"], not facts["attention_dropout"]),
        "rope_type": (rope.get("rope_type"), rope.get("rope_type") in ROTARY),
        "mrope_section": (rope.get("mrope_section"), ("mrope_section" in rope) == (kind in LANGUAGE)),
        "partial_rotary_factor": (
            rope.get("partial_rotary_factor", facts.get("partial_rotary_factor")),
            rope.get("partial_rotary_factor", facts.get("partial_rotary_factor")) in (None, 1),
        ),
        # Megatron has one switch for the biases of all matrices.
        "attention_bias": (attention_bias, attention_bias == mlp_bias),
    }
    return [
        Problem("model.path", kind, f"its {name} of {value} is not built by strategy=megatron", "use strategy=fsdp")
        for name, (value, fits) in asked.items()
        if not fits
    ]


def _tensor_problems(facts: Mapping[str, Any], sizes: Sizes) -> list[Problem]:
    key, size = "megatron_config.tensor_model_parallel_size", sizes.tensor
    problems = []
    shared = {
        "attention heads": facts["num_attention_heads"],
        "features of the hidden state": facts["hidden_size"],
        "features between the matrices of a layer": facts["intermediate_size"],
    }
    if facts["model_type"] == "qwen3_moe":
        shared["features between the matrices of an expert"] = facts["moe_intermediate_size"]
    for name, number in shared.items():
        if number % size:
            problems.append(
                Problem(key, size, f"does not divide the model's {number} {name}", "give a divisor of that")
            )
    groups = facts["num_key_value_heads"]
    if groups % size and size % groups:
        message = f"neither divides the model's {groups} key heads nor is a multiple of them"
        problems.append(Problem(key, size, message, "give a divisor or a multiple of that"))
    return problems


def _pipeline_problems(facts: Mapping[str, Any], sizes: Sizes) -> list[Problem]:
    layers, parts = facts["num_hidden_layers"], sizes.pipeline * (sizes.virtual_pipeline or 1)
    if layers % parts == 0:
        return []
    if sizes.virtual_pipeline is None:
        key, value, found = "megatron_config.pipeline_model_parallel_size", sizes.pipeline, ""
    else:
        key, value = "megatron_config.virtual_pipeline_model_parallel_size", sizes.virtual_pipeline
        found = f"times {sizes.pipeline} stages is {parts} parts, which "
    return [
        Problem(
            key, value, f"{found}does not divide the model's {layers} layers", "give sizes whose product divides it"
        )
    ]


def _image_problems(facts: Mapping[str, Any], tower: Mapping[str, Any] | None, sizes: Sizes) -> list[Problem]:
    if tower is None:
        return []
    asked = {
        "context_parallel_size": (sizes.context, sizes.context > 1),
        "sequence_parallel_size": (sizes.tensor, sizes.sequence_parallel),
    }
    problems = [
        Problem(f"megatron_config.{key}", size, "does not go with a model that takes images", "leave it out")
        for key, (size, is_set) in asked.items()
        if is_set
    ]
    deep, parts = len(tower.get("deepstack_visual_indexes") or ()), sizes.pipeline * (sizes.virtual_pipeline or 1)
    if facts["num_hidden_layers"] < deep * parts:
        message = f"leaves the first part fewer than the {deep} layers that are given features of images"
        fix = f"give sizes of {facts['num_hidden_layers'] // deep} parts at most"
        problems.append(Problem("megatron_config.pipeline_model_parallel_size", sizes.pipeline, message, fix))
    return problems


def _expert_problems(facts: Mapping[str, Any], sizes: Sizes, *, on_cpu: bool) -> list[Problem]:
    key = "megatron_config.expert_model_parallel_size"
    if facts["model_type"] != "qwen3_moe":
        return [Problem(key, sizes.expert, "the model has no experts", "leave it out")] if sizes.expert > 1 else []
    experts = facts.get("num_local_experts") or facts["num_experts"]
    problems = []
    if experts % sizes.expert:
        message = f"does not divide the model's {experts} experts"
        problems.append(Problem(key, sizes.expert, message, "give a divisor of that"))
    if on_cpu and sizes.expert > 1 and sizes.tensor > 1:
        message = "does not go with a tensor parallel size above 1 on a CPU: gloo gathers equal numbers of tokens only"
        problems.append(Problem(key, sizes.expert, message, "leave out one of them"))
    if sizes.tensor > 1 and not sizes.sequence_parallel:
        message = f"has to be {sizes.tensor}, the tensor parallel size, to train a model with experts"
        key = "megatron_config.sequence_parallel_size"
        problems.append(Problem(key, 1, message, f"write {key}={sizes.tensor}"))
    return problems
