"""Lengths become a plan: which examples share a row, which rows a micro-batch, which micro-batches a rank.

Integers in, integers out; no token is touched. Its rule: every position is placed exactly once, whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Row: TypeAlias = tuple[int, ...]
"""Positions, in the drawn batch, of the examples that share one row; empty is a filler row of padding."""
MicroBatchPlan: TypeAlias = tuple[Row, ...]
RankPlan: TypeAlias = tuple[MicroBatchPlan, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a backend needs of a plan: how many ranks share it, and the shapes its rows may have."""

    data_rank: int = 0
    data_size: int = 1
    segment_multiple: int = 1
    """Each segment is padded to a multiple of this many tokens."""
    row_multiple: int = 1
    """Each row is padded to a multiple of this many tokens."""
    micro_batch_multiple: int = 1
    """Each rank's number of micro-batches is a multiple of this."""
    equal_lengths: bool = False
    """All rows of a batch have one length."""


def plan_micro_batches(
    lengths: Sequence[int], *, micro_batch_size: int, share_row: bool, layout: Layout
) -> tuple[RankPlan, ...]:
    """Deal a batch to the ranks in micro-batches of ``micro_batch_size`` examples.

    Args:
        lengths: tokens of each drawn example.
        micro_batch_size: examples a micro-batch, at most.
        share_row: whether the examples of a micro-batch lie in one row, or in a row each.
        layout: the ranks; each gets the same number of micro-batches, filled up with filler rows.
    """
    per_rank = -(-len(lengths) // layout.data_size)
    num_micro_batches = round_up(-(-per_rank // micro_batch_size), layout.micro_batch_multiple)
    plans = []
    for rank in range(layout.data_size):
        positions = range(rank, len(lengths), layout.data_size)
        groups = [tuple(positions[i : i + micro_batch_size]) for i in range(0, len(positions), micro_batch_size)]
        rows = [(group,) if share_row else tuple((position,) for position in group) for group in groups]
        plans.append(tuple(rows) + (((),),) * (num_micro_batches - len(rows)))
    return tuple(plans)


def plan_bins(lengths: Sequence[int], *, capacity: int, layout: Layout) -> tuple[RankPlan, ...]:
    """Pack a whole batch into rows of at most ``capacity`` tokens, one row a micro-batch.

    Longest first, each into the fullest row it still fits (best-fit decreasing, within 11/9 of the fewest rows).
    The rows are dealt to the ranks by tokens, heaviest first, to the rank with the least so far.
    """
    sizes = [round_up(length, layout.segment_multiple) for length in lengths]
    rows = _best_fit_decreasing(sizes, capacity)
    num_micro_batches = round_up(-(-len(rows) // layout.data_size), layout.micro_batch_multiple)
    plans: list[list[MicroBatchPlan]] = [[] for _ in range(layout.data_size)]
    loads = [0] * layout.data_size
    for row in sorted(rows, key=lambda row: -sum(sizes[p] for p in row)):
        rank = min((r for r in range(layout.data_size) if len(plans[r]) < num_micro_batches), key=lambda r: loads[r])
        plans[rank].append((row,))
        loads[rank] += sum(sizes[p] for p in row)
    return tuple(tuple(plan) + (((),),) * (num_micro_batches - len(plan)) for plan in plans)


def round_up(size: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def _best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[Row]:
    rows: list[list[int]] = []
    room: list[int] = []
    for position in sorted(range(len(sizes)), key=lambda p: (-sizes[p], p)):
        size = sizes[position]
        assert size <= capacity, f"an example of {size} tokens does not fit a row of {capacity}"
        fitting = [r for r, left in enumerate(room) if left >= size]
        if not fitting:
            rows.append([])
            room.append(capacity)
            fitting = [len(rows) - 1]
        best = min(fitting, key=lambda r: room[r])
        rows[best].append(position)
        room[best] -= size
    return [tuple(sorted(row)) for row in rows]
