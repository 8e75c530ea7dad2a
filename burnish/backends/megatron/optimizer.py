"""Megatron's distributed optimizer: gradients are summed, measured, clipped and applied as FSDP's are.

Its rule: it is always the distributed one, so that float32 masters and moments have one form on any number of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import nn

from burnish.backends.megatron.pieces import Held
from burnish.backends.megatron.vision import part_of_model
from burnish.backends.optimizer import Recipe
from burnish.config.choices import ModelPart
from burnish.errors import ConfigError, Problem

KWARGS = "megatron_config.optimizer_config_kwargs"
_OWN = ("lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad", "optimizer", "bf16", "fp16")
"""Keys of Megatron's OptimizerConfig that Burnish has keys of its own for, or decides."""


def wrap(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """``models`` with buffers in which gradients are summed over micro-batches and ranks, in float32."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [
        DistributedDataParallel(model.config, settings, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]


class AdamOptimizer:
    """AdamW of all ranks over wrapped models.

    Args:
        models: of :func:`wrap`.
        recipe: how a step changes the weights.
        dtype: of the weights.
        extra: more keys of Megatron's ``OptimizerConfig``.

    Raises:
        ConfigError: the optimizer is not ``adamw``, or a key of ``extra`` is not Megatron's or has one of ours.
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        *,
        recipe: Recipe,
        dtype: torch.dtype,
        extra: Mapping[str, Any],
    ) -> None:
        if recipe.optimizer != "adamw":
            problem = Problem("optimizer_config.name", recipe.optimizer, "there is no such optimizer", "write adamw")
            raise ConfigError([problem])
        settings = _settings(recipe, dtype, extra)
        self._max_grad_norm = recipe.max_grad_norm
        groups = _groups(settings, recipe.lr_by_part)
        self._all: ChainedOptimizer = get_megatron_optimizer(settings, list(models), groups)
        for group in self._all.param_groups:
            # Megatron leaves that to its own scheduler.
            group["weight_decay"] = recipe.weight_decay * group["wd_mult"]
        for part in self.parts:
            part.init_state_fn(part.optimizer, part.config)
        self.num_steps = 0

    @property
    def parts(self) -> list[Any]:
        """The ``DistributedOptimizer`` of the dense weights and, where there are any, that of the experts."""
        return list(self._all.chained_optimizers)

    @property
    def num_steps(self) -> int:
        """Updates made so far: Adam's correction of its first steps depends on it."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._num_steps = number
        for part in self.parts:
            if isinstance(part.optimizer, torch.optim.AdamW):
                for state in part.optimizer.state.values():
                    state["step"] = torch.tensor(float(number))  # one each: it is counted up in place
            else:
                for group in part.optimizer.param_groups:
                    group["step"] = number

    def measure(self) -> float:
        """The global norm of the gradients, which are ready to be applied afterwards; equal on all ranks."""
        self._all.prepare_grads()
        return float(self._all.get_grad_norm())

    def apply(self, *, grad_norm: float, rate: Callable[[ModelPart], float]) -> None:
        """One update of the weights, on all ranks, by gradients that have ``grad_norm`` before clipping.

        Args:
            grad_norm: of all of them.
            rate: the learning rate of a part of the model.
        """
        for part in self.parts:
            if self._max_grad_norm:
                clip_grad_by_total_norm_fp32(part.get_parameters(), self._max_grad_norm, grad_norm)
        for group in self._all.param_groups:
            group["lr"] = rate(group.get("part", "language"))
        self._all.step_with_ready_grads()
        self._num_steps += 1

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._all.zero_grad()

    def take_weights(self) -> None:
        """Make the float32 masters equal to the models' weights, which were changed."""
        self._all.reload_model_params()

    def held(self) -> list[Held]:
        """What this rank updates, of each parameter of which it updates something."""
        return [
            Held(parameter, place.start, place.end, part._get_main_param_and_optimizer_states(parameter))
            for part in self.parts
            for parameter in part.model_param_group_index_map
            for place in (part._get_model_param_range_map(parameter)["param"],)
        ]

    @torch.no_grad()
    def restore(self, held: Sequence[Held], *, num_steps: int) -> None:
        """Take over masters and moments, in the order of :meth:`held`, whose tensors were filled."""
        of_parameter = {one.parameter: one.state for one in held}
        for part in self.parts:
            for parameter in part.model_param_group_index_map:
                part._set_main_param_and_optimizer_states(parameter, of_parameter[parameter])
        self.num_steps = num_steps


def _groups(settings: OptimizerConfig, rates: Mapping[ModelPart, float]) -> dict[ParamKey, Any] | None:
    """Megatron's own groups, divided by the parts of the model that have one of ``rates``; None is its own."""
    if not rates:
        return None
    groups: dict[ParamKey, Any] = get_standard_config_overrides(settings)
    for part in rates:
        is_of_part = ParamWithNamePredicate(part, lambda _, name, part=part: part_of_model(name) == part)
        groups[ParamKey(with_name_predicate=is_of_part)] = {"part": part}
    return groups


def _settings(recipe: Recipe, dtype: torch.dtype, extra: Mapping[str, Any]) -> OptimizerConfig:
    _require_free(extra)
    own = {
        "optimizer": "adam",
        "lr": 0.0,
        "adam_beta1": recipe.adam_betas[0],
        "adam_beta2": recipe.adam_betas[1],
        "adam_eps": recipe.eps,
        "weight_decay": recipe.weight_decay,
        "clip_grad": recipe.max_grad_norm or 0.0,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": True,
    }
    try:
        return OptimizerConfig(**{**own, **extra})
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError([Problem(KWARGS, dict(extra), str(error), "give what Megatron Core accepts here")]) from error


def _require_free(extra: Mapping[str, Any]) -> None:
    decided = {
        **dict.fromkeys(_OWN, ("is decided by optimizer_config and model.dtype", "use those")),
        "use_distributed_optimizer": ("is always true", "leave it out"),
        "optimizer_cpu_offload": ("is not built: checkpoints would lack what is kept on the CPU", "leave it out"),
    }
    unknown = ("Megatron has no such key", "see its OptimizerConfig")
    problems = [
        Problem(f"{KWARGS}.{name}", value, *decided.get(name, unknown))
        for name, value in extra.items()
        if name in decided or name not in OptimizerConfig.__dataclass_fields__
    ]
    if problems:
        raise ConfigError(problems)
