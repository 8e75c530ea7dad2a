"""AdamW, and the learning rate as a pure function of the step, so that a resumed run cannot have another."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from burnish.config.choices import ModelPart, Schedule
from burnish.errors import ConfigError, Problem
from burnish.models.vision import part_of

WSD_DECAY_SHARE = 0.1
"""Share of the steps over which ``wsd`` decays, at the end."""
INVERSE_SQRT_TIMESCALE = 10_000
"""Steps after which ``inverse_sqrt`` without warm-up has fallen to 1/sqrt(2)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a step changes the weights."""

    optimizer: str = "adamw"
    """Its name."""
    learning_rate: float = 1e-5
    """The highest."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    """Not of norms and biases."""
    max_grad_norm: float | None = 1.0
    """Gradients above it are scaled down to it; None or 0 leaves them."""
    schedule: Schedule = Schedule.CONSTANT_WITH_WARMUP
    """Shape of the learning rate."""
    num_warmup_steps: float = 0
    """Below 1 a share of all steps."""
    min_lr_ratio: float = 0.0
    """Where the schedule ends, as a share of ``learning_rate``."""
    lr_by_part: Mapping[ModelPart, float] = field(default_factory=dict)
    """The highest rate of the parts of a vision-language model that have one of their own."""
    frozen: Collection[ModelPart] = ()
    """Parts of it that are not trained."""

    def rate(self, step: int, *, num_steps: int, part: ModelPart = "language") -> float:
        """The learning rate of ``part`` in optimizer step ``step`` out of ``num_steps``; 1 is the first."""
        return learning_rate(
            step,
            schedule=self.schedule,
            lr=self.lr_by_part.get(part, self.learning_rate),
            num_steps=num_steps,
            num_warmup_steps=self.num_warmup_steps,
            min_lr_ratio=self.min_lr_ratio,
        )


def learning_rate(
    step: int, *, schedule: Schedule, lr: float, num_steps: int, num_warmup_steps: float = 0, min_lr_ratio: float = 0.0
) -> float:
    """The rate of optimizer step ``step``; 1 is the first.

    With w warm-up steps out of n, step s <= w has ``lr * s / w``: the first step moves, step w has the whole rate.
    A later step has ``lr * (m + (1 - m) * f)`` where m is ``min_lr_ratio`` and f is, for t = s - 1 - w steps done since:

    * ``constant_with_warmup``: 1 (``constant`` is that without warm-up)
    * ``linear``: 1 - t / (n - w)
    * ``cosine``: (1 + cos(pi t / (n - w))) / 2
    * ``wsd``: 1, and over the last tenth, d steps, 1 - (s - 1 - (n - d)) / d
    * ``inverse_sqrt``: sqrt(w / (w + t)), with 10,000 for w where there is no warm-up

    So the decay would reach its minimum one step after the last: every step trains.

    Args:
        step: >= 1
        schedule: the shape.
        lr: the highest rate.
        num_steps: n, the horizon; steps after it keep the rate of n + 1.
        num_warmup_steps: w; below 1 it is a share of ``num_steps``, rounded up.
        min_lr_ratio: m
    """
    if schedule is Schedule.CONSTANT:
        return lr
    # Rounded first: 0.07 of 100 steps is 7.000000000000001 in binary.
    warmup = math.ceil(round(num_warmup_steps * num_steps, 6)) if num_warmup_steps < 1 else int(num_warmup_steps)
    if step <= warmup:
        return lr * step / warmup
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * _decay(schedule, step - 1 - warmup, warmup, num_steps))


def _decay(schedule: Schedule, done: int, warmup: int, num_steps: int) -> float:
    progress = min(1.0, done / max(1, num_steps - warmup))
    match schedule:
        case Schedule.LINEAR:
            return 1 - progress
        case Schedule.COSINE:
            return (1 + math.cos(math.pi * progress)) / 2
        case Schedule.WSD:
            length = max(1, round(WSD_DECAY_SHARE * num_steps))
            return 1 - min(1.0, max(0, done + warmup - (num_steps - length)) / length)
        case Schedule.INVERSE_SQRT:
            timescale = warmup or INVERSE_SQRT_TIMESCALE
            return math.sqrt(timescale / (timescale + done))
        case _:
            return 1.0


def freeze(model: Any, recipe: Recipe) -> Any:
    """``model``, of whose parameters only those have gradients that ``recipe`` trains."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in recipe.frozen)
    return model


def build_optimizer(parameters: Mapping[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over the trainable ``parameters``, by name, without decay on norms and biases (one dimension or none).

    Each of its groups is of one ``part`` of the model; its learning rate is set before each step.

    Raises:
        ConfigError: it is to be another than ``adamw``, or nothing is left to train.
    """
    if recipe.optimizer != "adamw":
        problem = Problem("optimizer_config.name", recipe.optimizer, "there is no such optimizer", "write adamw")
        raise ConfigError([problem])
    groups: dict[tuple[ModelPart, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            decay = recipe.weight_decay if parameter.ndim > 1 else 0.0
            groups.setdefault((part_of(name), decay), []).append(parameter)
    if not groups:
        raise ConfigError([Problem("model.freeze", "every part", "leaves nothing to train", "leave a part out")])
    made = [{"params": own, "weight_decay": decay, "part": part} for (part, decay), own in groups.items()]
    settings: dict[str, Any] = {"betas": recipe.adam_betas, "eps": recipe.eps, "fused": True}
    return torch.optim.AdamW(made, lr=0.0, **settings)


def optimizer_tensors(
    optimizer: torch.optim.AdamW, parameters: dict[str, nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """The state of ``optimizer`` as tensors by kind and parameter name, to be written or filled in place.

    A parameter that was never stepped gets the state it would begin with.
    """
    state: dict[str, dict[str, torch.Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}, "step": {}}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        own = optimizer.state[parameter]
        if not own:
            own["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            own["exp_avg"] = torch.zeros_like(parameter)
            own["exp_avg_sq"] = torch.zeros_like(parameter)
        for kind, tensors in state.items():
            tensors[name] = own[kind]
    return state
