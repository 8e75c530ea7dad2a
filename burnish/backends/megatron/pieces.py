"""What a rank updates of a parameter, a run of its elements in memory, becomes pieces of the whole model's tensors.

Its rule: nothing is copied and nothing is sent; all pieces are views.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
from torch import Tensor

OPTIMIZER = "optimizer."
"""What the names of the optimizer's tensors begin with, and no weight's."""
KINDS = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank updates of one parameter."""

    parameter: torch.nn.Parameter
    start: int
    """Of its elements in memory, the first."""
    stop: int
    """And the one after the last."""
    state: dict[str, Tensor]
    """[stop - start] of each of :data:`KINDS`, and what else the optimizer keeps."""


def pieces_of(held: Held, whole: ShardedTensor | ShardedTensorFactory) -> Iterator[ShardedTensor]:
    """Master and moments of ``held``, where they lie in tensors of the whole model.

    Args:
        held: part of a parameter.
        whole: where all of the parameter lies.
    """
    # It has no memory, but tells where the parts that a factory makes of it begin.
    blank = torch.empty(held.parameter.shape, device="meta")
    parts: dict[int, Any] = {0: replace(whole, data=blank, **_format(whole, blank))}
    apply_factories(parts)
    for part in map(_as_matrix, nested_values(parts)):
        first, size = part.data.storage_offset(), part.data.numel()
        start, stop = max(held.start, first), min(held.stop, first + size)
        for begin, *shape in boxes(start - first, stop - first, columns=part.local_shape[-1]):
            for kind in KINDS:
                flat = held.state[kind][first + begin - held.start :][: shape[0] * shape[1]]
                yield _piece(part, kind, flat.view(shape[-len(part.local_shape) :]), begin)


def boxes(start: int, stop: int, *, columns: int) -> Iterator[tuple[int, int, int]]:
    """(first element, rows, columns) of rectangles, three at most, that are elements ``start`` to ``stop`` of a matrix."""
    while start < stop:
        column = start % columns
        rows = (stop - start) // columns if column == 0 else 0
        width = columns if rows else min(stop - start, columns - column)
        yield start, max(1, rows), width
        start += max(1, rows) * width


def _as_matrix(part: ShardedTensor) -> ShardedTensor:
    """``part``; of more than two dimensions, those after the first, which are not cut, become one."""
    if len(part.local_shape) <= 2:
        return part
    columns = prod(part.local_shape[1:])
    return replace(
        part,
        data=part.data.flatten(1),
        local_shape=(part.local_shape[0], columns),
        global_shape=(part.global_shape[0], columns),
        global_offset=(part.global_offset[0], 0),
        axis_fragmentations=None,
    )


def _piece(part: ShardedTensor, kind: str, data: Tensor, begin: int) -> ShardedTensor:
    """``data``, which begins at element ``begin`` of ``part``, under a name of its own."""
    inside = divmod(begin, part.local_shape[-1])[-data.ndim :]
    return replace(
        part,
        key=f"{OPTIMIZER}state.{kind}.{part.key}",
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_offset=tuple(a + b for a, b in zip(part.global_offset, inside, strict=True)),
        axis_fragmentations=None,
    )


def _format(whole: ShardedTensor | ShardedTensorFactory, data: Tensor) -> dict[str, Any]:
    return {"dtype": data.dtype} if isinstance(whole, ShardedTensor) else {}
