"""A model becomes one whose parameters are spread over the ranks (FSDP2), with its gradients summed, not averaged."""

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from burnish.backends.comm import Ranks
from burnish.models.loss import LossModel

_MESHES = count()
MIN_LAYER_PARAMETERS = 2**20
"""A smaller layer is gathered with the rest: by itself it would cost more time than it saves memory."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the model is spread over the ranks, and what is kept of it between its uses."""

    fsdp_size: int | None = None
    """Ranks that share one copy of the weights; None is all, fewer hold copies (HSDP)."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer state lie in host memory while they are not computed with."""
    reduce_dtype: torch.dtype = torch.float32
    """In which gradients are summed over ranks and micro-batches."""
    reshard_after_forward: bool = True
    """A layer is given up between its forward and its backward."""
    activation_checkpointing: bool = False
    """A layer keeps its input only, and is computed again in the backward."""
    compile_layers: bool = False
    """Each layer is compiled, but for its attention, for rows of any length."""


def build_mesh(ranks: Ranks, *, fsdp_size: int | None) -> DeviceMesh:
    """All ranks, in groups of ``fsdp_size`` that hold a copy of the model each; one group where that is None."""
    parts = fsdp_size or ranks.world_size
    shape = (parts,) if parts == ranks.world_size else (ranks.world_size // parts, parts)
    # DTensor takes meshes of equal names and ranks for one, also one of a group that was left.
    number = next(_MESHES)
    names = tuple(f"{name}_{number}" for name in ("copies", "parts")[-len(shape) :])
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)


def shard(model: LossModel, *, mesh: DeviceMesh, dtype: torch.dtype, sharding: Sharding) -> FSDPModule:
    """Spread ``model`` over ``mesh``, in place, and return it.

    Every decoder layer is gathered by itself, the rest together.

    Args:
        model: on meta, all that is trained in float32.
        mesh: of :func:`build_mesh`.
        dtype: of the computation.
        sharding: how.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=sharding.reduce_dtype)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if sharding.cpu_offload else OffloadPolicy()
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    for layer in decoder_layers(model.model):
        if sharding.compile_layers:
            layer.compile(dynamic=True)
        if sharding.activation_checkpointing:
            checkpoint(layer)
        if sum(parameter.numel() for parameter in layer.parameters()) >= MIN_LAYER_PARAMETERS:
            fully_shard(layer, **settings, reshard_after_forward=sharding.reshard_after_forward)
    # Its backward follows at once: embedding and head would be gathered again for nothing.
    spread: FSDPModule = fully_shard(model, **settings, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for method in (model.logits, model.native_logits, model.last_logits):
        register_fsdp_forward_method(model, method.__name__)
    return spread


def move_to_host(model: nn.Module) -> None:
    """Put the parameters of ``model`` into host memory, and leave its buffers where they are."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in moved:
                moved[parameter] = nn.Parameter(parameter.detach().cpu(), requires_grad=parameter.requires_grad)
            setattr(module, name, moved[parameter])


def decoder_layers(model: Any) -> list[nn.Module]:
    """The blocks that transformers says must not be split, outermost first; none lies in another."""
    kinds = set(model._no_split_modules or ())
    found: list[nn.Module] = []
    for module in model.modules():
        if type(module).__name__ in kinds and not any(module in outer.modules() for outer in found):
            found.append(module)
    return found
