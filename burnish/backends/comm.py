"""Processes become one group of ranks. At world size 1 the group needs no port, no network and no launcher."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among all."""

    rank: int
    world_size: int
    device: torch.device
    """The one device this rank computes on."""
    owns_group: bool
    """Whether the process group was made here, so that ``leave`` ends it."""


def device_type() -> str:
    """``cuda`` where there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def join(device: str | None = None) -> Ranks:
    """Enter the group that the environment names (``RANK``, ``WORLD_SIZE``, ...); without one, be a group of one.

    Args:
        device: ``cpu`` or ``cuda``; by default a GPU where there is one.
    """
    kind = device or device_type()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        # Rows differ in length: segments of memory that grow are not torn into pieces.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(here)
    owns_group = not dist.is_initialized()
    if owns_group:
        # Gloo beside NCCL: checkpoints are coordinated on the CPU, apart from training.
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group(backend)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return Ranks(dist.get_rank(), dist.get_world_size(), here, owns_group)


def leave(ranks: Ranks) -> None:
    """Undo :func:`join`; twice is once."""
    if ranks.owns_group and dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(values: Sequence[float], *, ranks: Ranks) -> list[float]:
    """``values`` summed over all ranks, in float64; equal on all of them."""
    if ranks.world_size == 1:
        return [float(value) for value in values]
    total = torch.tensor(values, dtype=torch.float64, device=ranks.device)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]
