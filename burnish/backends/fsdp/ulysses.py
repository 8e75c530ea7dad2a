"""Ranks that hold a part each of the same rows come together in attention (Ulysses, Jacobs et al. 2023).

Its rule: outside attention a rank knows its own tokens only; inside it, whole rows of its share of the heads.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burnish.backends.comm import Ranks
from burnish.data.packing import Layout


@dataclass(frozen=True, slots=True)
class SequenceExchange:
    """Implements :class:`burnish.models.attention.Exchange` by one message between each two ranks of ``group``."""

    rank: int
    """This one's place in ``group``: whose parts follow each other in the row."""
    size: int
    """Ranks in ``group``; divides the heads of a query and the length of every row."""
    group: dist.ProcessGroup

    @classmethod
    def between(cls, ranks: Ranks, *, layout: Layout) -> "SequenceExchange | None":
        """That of the ranks with the same ``data_rank``; None where each has rows of its own. All make it together."""
        size = ranks.world_size // layout.data_size
        if size == 1:
            return None
        assert layout.row_multiple % size == 0, f"rows of multiples of {layout.row_multiple} for {size} ranks"
        group, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]
        return cls(ranks.rank % size, size, group)

    def part(self, length: int) -> slice:
        """The tokens of a row of ``length`` that this rank holds."""
        own = length // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def whole_rows(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """[rows, heads, length / size, width] each -> [rows, heads / size, length, width].

        Key heads are repeated as often as it takes to deal them out.
        """
        repeats = self.size // gcd(self.size, key.shape[1])
        tensors = (query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
        num_rows, _, part, _ = query.shape
        # [size, rows, length / size, heads / size * width]: all three travel together.
        dealt = [x.transpose(1, 2).reshape(num_rows, part, self.size, -1).movedim(2, 0) for x in tensors]
        rows = self._swap(torch.cat(dealt, dim=3)).transpose(0, 1).flatten(1, 2)
        whole = torch.split(rows, [x.shape[3] for x in dealt], dim=2)
        return [
            own.reshape(num_rows, part * self.size, -1, x.shape[3]).transpose(1, 2)
            for own, x in zip(whole, tensors, strict=True)
        ]

    def own_part(self, output: Tensor) -> Tensor:
        """[rows, length, heads / size, width] -> [rows, length / size, heads, width]."""
        num_rows, length, *head = output.shape
        parts = output.reshape(num_rows, self.size, length // self.size, *head).movedim(1, 0)
        return self._swap(parts).movedim(0, 2).flatten(2, 3)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self.group)

    def _swap(self, tensor: Tensor) -> Tensor:
        swapped: Tensor = _AllToAll.apply(tensor, self.group)  # type: ignore[no-untyped-call]
        return swapped


class _AllToAll(torch.autograd.Function):
    """The i-th of the first dimension goes to rank i; what rank i sent stands there instead. So do the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
