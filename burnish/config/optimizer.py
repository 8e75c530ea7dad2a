"""The keys below ``optimizer_config``: the update and its learning rate."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from burnish.config.choices import ModelPart, Schedule
from burnish.config.section import Section


class OptimizerConfig(Section):
    """The optimizer and the schedule of its learning rate, on both backends."""

    name: Literal["adamw"] = "adamw"
    """The update rule; norms and biases are not decayed."""
    lr: float = Field(default=1e-5, ge=0)
    """Highest learning rate."""
    adam_betas: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean square."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients with a larger norm are scaled down to it; 0 leaves them."""
    scheduler: Schedule = Schedule.CONSTANT_WITH_WARMUP
    """Shape of the learning rate after warm-up; its horizon is the number of steps of the run."""
    num_warmup_steps: float = Field(default=0, ge=0)
    """Steps over which the rate rises to `lr`; below 1 it is a share of all steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The rate ends at this share of `lr`, where the schedule falls."""
    lr_by_part: Mapping[ModelPart, float] = {}
    """Learning rates of parts of a vision-language model that differ from `lr`."""
