"""The keys below ``placement``, ``fsdp_config`` and ``megatron_config``: how the model is spread."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from burnish.config.choices import Dtype
from burnish.config.section import Section
from burnish.config.values import Flag, Free, OptionalWhole, Whole, none_or, one_of, within, word_of


class PlacementConfig(Section):
    """The machines and GPUs of a run."""

    num_nodes: Annotated[Whole, within(">= 1")] = 1
    """Machines."""
    num_gpus_per_node: Annotated[Whole, within(">= 1")] = 4
    """GPUs, and so processes, on each; left unset, at most those there are, and 1 on a machine without any."""

    @property
    def world_size(self) -> int:
        """Processes of the whole run."""
        return self.num_nodes * self.num_gpus_per_node


class MixedPrecisionConfig(Section):
    """Formats of what FSDP2 sends between ranks."""

    param_dtype: Annotated[Dtype | None, BeforeValidator(none_or(word_of(Dtype)))] = None
    """Format in which weights are gathered and used; none is `model.dtype`."""
    reduce_dtype: Annotated[Dtype, one_of(Dtype)] = Dtype.FLOAT32
    """Format in which gradients are summed over the ranks."""


class FsdpConfig(Section):
    """The FSDP2 backend."""

    cpu_offload: Flag = False
    """Whether weights and optimizer state wait in host memory between their uses."""
    reshard_after_forward: Flag = True
    """Whether gathered weights are freed after the forward pass and gathered again for the backward pass."""
    fsdp_size: Annotated[OptionalWhole, within(">= 1")] = None
    """Ranks that share one copy of the weights; none is all of them, fewer replicates the copies (HSDP)."""
    activation_checkpointing: Flag = False
    """Whether activations are computed again in the backward pass instead of being kept."""
    compile: Flag = False
    """Whether the layers are compiled."""
    mixed_precision: MixedPrecisionConfig = MixedPrecisionConfig()


class MegatronConfig(Section):
    """The Megatron Core backend."""

    tensor_model_parallel_size: Annotated[Whole, within(">= 1")] = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: Annotated[Whole, within(">= 1")] = 1
    """Stages the layers are divided into."""
    context_parallel_size: Annotated[Whole, within(">= 1")] = 1
    """Ranks that share each row's tokens."""
    expert_model_parallel_size: Annotated[Whole, within(">= 1")] = 1
    """Ranks that share the experts of a mixture-of-experts layer."""
    sequence_parallel_size: Annotated[Whole, within(">= 1")] = 1
    """Megatron's own sequence parallelism: 1, or the tensor parallel size."""
    virtual_pipeline_model_parallel_size: Annotated[OptionalWhole, within(">= 1")] = None
    """Interleaved parts of each pipeline stage; none does not interleave."""
    cpu: Flag = False
    """Whether to run on a CPU, for tests."""
    transformer_config_kwargs: Free = Field(default_factory=dict)
    """Passed on to Megatron's TransformerConfig."""
    optimizer_config_kwargs: Free = Field(default_factory=dict)
    """Passed on to Megatron's OptimizerConfig."""
