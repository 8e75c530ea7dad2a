"""Megatron's distributed optimizer: gradients are summed, measured, clipped and applied as FSDP's are.

Its rule: it is always the distributed one, so that float32 masters and moments have one form on any number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import nn

from burnish.backends.optimizer import Recipe
from burnish.errors import ConfigError, Problem

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "non_homogeneous_layers": True,
    "singleton_local_shards": False,
}
"""How Megatron describes what a rank holds: each layer under a name of its own, and of moments whole tensors."""
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
        _require_free(extra)
        settings = OptimizerConfig(
            **{
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
                **extra,
            }
        )
        self._max_grad_norm = recipe.max_grad_norm
        self._all: ChainedOptimizer = get_megatron_optimizer(settings, list(models))
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

    def apply(self, *, grad_norm: float, lr: float) -> None:
        """One update of the weights, on all ranks, by gradients that have ``grad_norm`` before clipping."""
        for part in self.parts:
            if self._max_grad_norm:
                clip_grad_by_total_norm_fp32(part.get_parameters(), self._max_grad_norm, grad_norm)
        for group in self._all.param_groups:
            group["lr"] = lr
        self._all.step_with_ready_grads()
        self._num_steps += 1

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._all.zero_grad()

    def take_weights(self) -> None:
        """Make the float32 masters equal to the models' weights, which were changed."""
        self._all.reload_model_params()

    def sharded_states(self, weights: Mapping[int, Any], *, is_loading: bool) -> list[dict[int, dict[str, Any]]]:
        """For each part, by number, the master and the moments of each weight in Megatron's sharded form.

        Args:
            weights: the models' own, sharded; their data are the parameters.
            is_loading: whether they are to be filled; else they are gathered from the ranks that hold a piece each.
        """
        shards, _ = extract_sharded_tensors_and_factories(weights)
        of_parameter = {shard.data: shard for shard in nested_values(shards)}
        return [_whole_states(part, of_parameter, is_loading=is_loading) for part in self.parts]

    def restore(self, states: Sequence[Mapping[int, Mapping[str, torch.Tensor]]], *, num_steps: int) -> None:
        """Take over whole masters and moments, in the order of :meth:`sharded_states`."""
        for part, state in zip(self.parts, states, strict=True):
            for own in part.optimizer.state.values():
                own.pop("step", None)  # Megatron would look for it in ``state``
            part.load_parameter_state_from_fully_reshardable(state)
        self.num_steps = num_steps


def _whole_states(part: Any, of_parameter: Mapping[Any, Any], *, is_loading: bool) -> dict[int, dict[str, Any]]:
    """As Megatron's ``sharded_param_state_fully_reshardable``, which mixes up parameters if a bucket ends in padding.

    It looks for them where they lie in the buffer; what is gathered has no padding between the buckets.
    """
    gathered = part.get_parameter_state_dp_zero(use_gloo_comm=False, empty_data=is_loading, return_on_all_ranks=True)
    states: list[dict[str, Any]] = []
    for number, buffer in enumerate(part.buffers):
        (wholes,) = gathered[number].values()
        sizes = accumulate((bucket.numel_unpadded for bucket in buffer.buckets), initial=0)
        shifts = [begin - bucket.offset for begin, bucket in zip(sizes, buffer.buckets, strict=False)]
        for parameter, (start, stop, bucket) in buffer.param_index_map.items():
            place = slice(start + shifts[bucket], stop + shifts[bucket])
            states.append(
                {
                    kind: _named_as(of_parameter[parameter], kind, wholes[kind][place].view(parameter.shape))
                    for kind in ("param", "exp_avg", "exp_avg_sq")
                }
            )
    return dict(enumerate(states))


def _named_as(shard: Any, kind: str, data: torch.Tensor) -> Any:
    """``data``, of the shape of a weight, in the place of the weight's ``shard`` and under a name of its own."""
    # A factory makes shards of its parts, and has no format.
    dtype = {} if isinstance(shard, ShardedTensorFactory) else {"dtype": data.dtype}
    return replace(shard, key=f"optimizer.state.{kind}.{shard.key}", data=data, **dtype)


def _require_free(extra: Mapping[str, Any]) -> None:
    key = "megatron_config.optimizer_config_kwargs"
    for name, value in extra.items():
        if name in _OWN:
            raise ConfigError(
                [Problem(f"{key}.{name}", value, "is decided by optimizer_config and model.dtype", "use those")]
            )
        if name == "use_distributed_optimizer":
            raise ConfigError([Problem(f"{key}.{name}", value, "is always true", "leave it out")])
        if name not in OptimizerConfig.__dataclass_fields__:
            raise ConfigError([Problem(f"{key}.{name}", value, "Megatron has no such key", "see its OptimizerConfig")])
