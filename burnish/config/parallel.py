"""The keys below ``placement``, ``fsdp_config`` and ``megatron_config``: how the model is spread."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from burnish.config.choices import Dtype
from burnish.config.section import Section


class PlacementConfig(Section):
    """The machines and GPUs of a run."""

    num_nodes: int = Field(default=1, ge=1)
    """Machines."""
    num_gpus_per_node: int = Field(default=4, ge=1)
    """GPUs, and so processes, on each; left unset, at most those there are, and 1 on a machine without any."""


class MixedPrecisionConfig(Section):
    """Formats of what FSDP2 sends between ranks."""

    param_dtype: Dtype | None = None
    """Format in which weights are gathered and used; none is `model.dtype`."""
    reduce_dtype: Dtype = "float32"
    """Format in which gradients are summed over the ranks."""


class FsdpConfig(Section):
    """The FSDP2 backend."""

    cpu_offload: bool = False
    """Whether weights and optimizer state wait in host memory between their uses."""
    reshard_after_forward: bool = True
    """Whether gathered weights are freed after the forward pass and gathered again for the backward pass."""
    fsdp_size: int | None = Field(default=None, ge=1)
    """Ranks that share one copy of the weights; none is all of them, fewer replicates the copies (HSDP)."""
    activation_checkpointing: bool = False
    """Whether activations are computed again in the backward pass instead of being kept."""
    compile: bool = False
    """Whether the layers are compiled."""
    mixed_precision: MixedPrecisionConfig = MixedPrecisionConfig()


class MegatronConfig(Section):
    """The Megatron Core backend."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Stages the layers are divided into."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each row's tokens."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the experts of a mixture-of-experts layer."""
    sequence_parallel_size: int = Field(default=1, ge=1)
    """Megatron's own sequence parallelism: 1, or the tensor parallel size."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=1)
    """Interleaved parts of each pipeline stage; none does not interleave."""
    cpu: bool = False
    """Whether to run on a CPU, for tests."""
    transformer_config_kwargs: Mapping[str, Any] = {}
    """Passed on to Megatron's TransformerConfig."""
    optimizer_config_kwargs: Mapping[str, Any] = {}
    """Passed on to Megatron's OptimizerConfig."""
