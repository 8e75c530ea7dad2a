"""Processes become one group of ranks. At world size 1 the group needs no port, no network and no launcher.

The rule: before ranks wait for each other inside a collective, with its time-out, all have said that they are there.
"""

import json
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from burnish.errors import BurnishError, revived

_POLL_SECONDS = 0.1
_TO_MEET = timedelta(minutes=10)
"""How long the process that hosts the store may take to start."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among all."""

    rank: int
    world_size: int
    device: torch.device
    """The one device this rank computes on."""
    control: Any
    """A group on the CPU for small messages, apart from those of the training."""
    store: Store
    """Keys and values that all ranks see, without waiting for each other."""

    def gather(self, value: Any) -> list[Any]:
        """The JSON-ready ``value`` of every rank, in their order; equal on all of them."""
        if self.world_size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, 1, dtype=torch.int64)
        dist.all_gather(list(sizes), torch.tensor([len(mine)]), group=self.control)
        longest = int(sizes.max())
        texts = torch.zeros(self.world_size, longest, dtype=torch.uint8)
        padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
        dist.all_gather(list(texts), padded, group=self.control)
        return [
            json.loads(bytes(text[:size].tolist())) for text, size in zip(texts, sizes.flatten().tolist(), strict=True)
        ]

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each of ``flags``, whether it is set on any rank."""
        if self.world_size == 1:
            return list(flags)
        found = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return [bool(flag) for flag in found.tolist()]

    def agree(self, value: str, *, flag: bool) -> tuple[bool, bool]:
        """Whether ``value`` is the same on all ranks, and whether ``flag`` is set on any; in one message."""
        if self.world_size == 1:
            return True, flag
        number = zlib.crc32(value.encode())
        found = torch.tensor([number, -number, int(flag)])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        highest, lowest, any_flag = found.tolist()
        return highest == -lowest, bool(any_flag)

    def of_first(self, make: Callable[[], Any]) -> Any:
        """What ``make`` gives on rank 0, JSON-ready, on all of them; the others do not call it.

        Raises:
            BurnishError: that of rank 0, on every rank.
        """
        return self.of_each(lambda: make() if self.rank == 0 else None)[0]

    def of_each(self, make: Callable[[], Any], *, meeting: str = "") -> list[Any]:
        """What ``make`` gives on each rank, JSON-ready, in their order; equal on all of them.

        Args:
            make: called on every rank.
            meeting: place to meet at before the exchange, when some may take hours longer than others.

        Raises:
            BurnishError: that of the first rank that failed, on every rank.
        """
        if self.world_size == 1:
            return [make()]
        made: dict[str, Any]
        try:
            made = {"value": make()}
        except BurnishError as error:
            made = {"error": error.to_json()}
        if meeting:
            self.meet(meeting)
        found = self.gather(made)
        for one in found:
            if "error" in one:
                raise revived(one["error"])
        return [one["value"] for one in found]

    def sum(self, values: Sequence[float]) -> list[float]:
        """``values`` summed over all ranks, in float64; equal on all of them."""
        if self.world_size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def meet(self, place: str) -> None:
        """Return when every rank has come to ``place``, however long the last one takes; each place is met at once."""
        key = f"burnish/{place}"
        self.store.add(key, 1)
        while self.store.add(key, 0) < self.world_size:
            time.sleep(_POLL_SECONDS)

    def of_node(self, make: Callable[[], str]) -> str:
        """What ``make`` gives in one process of this machine, in all of them; the others do not call it."""
        key = f"burnish/node/{platform.node()}"
        if self.store.add(f"{key}/askers", 1) == 1:
            self.store.set(key, make())
        while not self.store.check([key]):
            time.sleep(_POLL_SECONDS)
        return str(self.store.get(key), "utf-8")

    def is_first_to_fail(self) -> bool:
        """Whether no rank has said so before: the others only lost contact with the one that has."""
        try:
            return bool(self.store.add("burnish/failed", 1) == 1)
        except dist.DistError:  # the process that held the store is gone, so it was the first
            return False


def device_type() -> str:
    """``cuda`` where there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_count() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count()


def claim(device: torch.device) -> None:
    """Compute on ``device`` from now on, if it is a GPU."""
    if device.type == "cuda":
        # Rows differ in length: segments of memory that grow are not torn into pieces.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)


@contextmanager
def joined(device: str | None = None) -> Iterator[Ranks]:
    """The group that the environment names (``RANK``, ``WORLD_SIZE``, ...), left afterwards; without one, a group of one.

    No device is touched before something is computed on it.

    Args:
        device: ``cpu`` or ``cuda``; by default a GPU where there is one.
    """
    kind = device or device_type()
    here = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    # Gloo beside NCCL: what is agreed on the CPU does not wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=_TO_MEET)))
    else:
        store, rank, world_size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=world_size)
    try:
        yield Ranks(rank, world_size, here, dist.new_group(backend="gloo"), store)
    finally:
        dist.destroy_process_group()


def alone(device: str = "cpu") -> Ranks:
    """The ranks of work that needs no group."""
    return Ranks(0, 1, torch.device(device), None, dist.HashStore())  # type: ignore[attr-defined]
