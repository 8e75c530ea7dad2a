"""The keys below ``optimizer_config``: the update and its learning rate."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from burnish.config.choices import ModelPart, OptimizerName, Schedule
from burnish.config.section import Section
from burnish.config.values import Number, Numbers, Words, mapping_of, one_of, read_number, within


class OptimizerConfig(Section):
    """The optimizer and the schedule of its learning rate, on both backends."""

    name: Annotated[OptimizerName, one_of(OptimizerName)] = OptimizerName.ADAMW
    """The update rule; norms and biases are not decayed."""
    lr: Annotated[Number, within(">= 0")] = 1e-5
    """Highest learning rate."""
    adam_betas: Annotated[Numbers, within(">= 0", "< 1")] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: Annotated[Number, within("> 0")] = 1e-8
    """Added to the root of the mean square."""
    weight_decay: Annotated[Number, within(">= 0")] = 0.01
    """Decoupled weight decay."""
    max_grad_norm: Annotated[Number, within(">= 0")] = 1.0
    """Gradients with a larger norm are scaled down to it; 0 leaves them."""
    scheduler: Annotated[Schedule, one_of(Schedule)] = Schedule.CONSTANT_WITH_WARMUP
    """Shape of the learning rate after warm-up; its horizon is the number of steps of the run."""
    num_warmup_steps: Annotated[Number, within(">= 0")] = 0
    """Steps over which the rate rises to `lr`; below 1 it is a share of all steps."""
    min_lr_ratio: Annotated[Number, within(">= 0", "<= 1")] = 0.0
    """The rate ends at this share of `lr`, where the schedule falls."""
    lr_by_part: Annotated[
        Mapping[str, float], BeforeValidator(mapping_of(read_number)), Words("mapping of vision, projector, language")
    ] = Field(default_factory=dict)
    """Learning rates of parts of a vision-language model that differ from `lr`."""

    @property
    def unknown_parts(self) -> tuple[str, ...]:
        """Names in ``lr_by_part`` that are no part of a model."""
        return tuple(name for name in self.lr_by_part if name not in list(ModelPart))
