"""Lengths become a plan: which examples share a row, which rows a micro-batch, which micro-batches a rank.

Integers in, integers out; no token is touched. Its rule: every position is placed exactly once, whole.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burnish.data.example import IntArray

Row: TypeAlias = tuple[int, ...]
"""Positions, in the drawn batch, of the examples that share one row; empty is a filler row of padding."""
MicroBatchPlan: TypeAlias = tuple[Row, ...]
RankPlan: TypeAlias = tuple[MicroBatchPlan, ...]
Cost: TypeAlias = Callable[[IntArray], NDArray[np.float64]]
"""Tokens of each example -> what it costs to compute, in any unit."""
Extra: TypeAlias = NDArray[np.float64] | float
"""What each example costs besides its tokens."""
Size = TypeVar("Size", int, IntArray)


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


def cost_of_tokens(lengths: IntArray) -> NDArray[np.float64]:
    """A ``Cost``: every token costs the same."""
    return lengths.astype(np.float64)


def plan_micro_batches(
    lengths: ArrayLike,
    *,
    micro_batch_size: int,
    share_row: bool,
    layout: Layout,
    cost: Cost = cost_of_tokens,
    extra: Extra = 0.0,
) -> tuple[RankPlan, ...]:
    """Deal a batch to the ranks in micro-batches of at most ``micro_batch_size`` examples, as few as that allows.

    Examples that share a row are chosen so that all micro-batches cost alike; those that are padded, by length.

    Args:
        lengths: tokens of each drawn example.
        micro_batch_size: examples a micro-batch, at most.
        share_row: whether the examples of a micro-batch lie in one row, or in a row each.
        layout: the ranks; each gets the same number of micro-batches, filled up with filler rows.
        cost: of examples; the ranks are balanced by it.
        extra: what each costs besides its tokens.
    """
    sizes = round_up(np.asarray(lengths, np.int64), layout.segment_multiple)
    costs = (cost(sizes) + extra).tolist()
    slots = _slots(-(-len(sizes) // micro_batch_size), layout)
    if share_row:
        rows = _spread([1] * len(sizes), costs, capacity=micro_batch_size, num_rows=slots)
        return _deal_rows(rows, costs, layout)
    parts = [part.tolist() for part in np.array_split(np.argsort(sizes, kind="stable"), slots)]
    padded = [len(part) * max((costs[p] for p in part), default=0.0) for part in parts]
    return _deal([tuple((p,) for p in part) or ((),) for part in parts], padded, layout)


def plan_bins(
    lengths: ArrayLike, *, capacity: int, layout: Layout, cost: Cost = cost_of_tokens, extra: Extra = 0.0
) -> tuple[RankPlan, ...]:
    """Pack a whole batch into rows of at most ``capacity`` tokens, one row a micro-batch.

    Best fit says how many micro-batches the ranks need. Where several share them, the examples are spread over these
    by cost, if they fit, so that no rank waits for another.

    Args:
        lengths: tokens of each drawn example.
        capacity: tokens of a row, at most; no example is longer.
        layout: the ranks; each gets the same number of micro-batches, filled up with filler rows.
        cost: of examples; the ranks are balanced by it.
        extra: what each costs besides its tokens.
    """
    tokens = np.asarray(lengths, np.int64)
    assert tokens.max() <= capacity, f"an example of {tokens.max()} tokens does not fit a row of {capacity}"
    # In whole multiples; an example longer than those of a row has one for itself.
    room = max(1, capacity // layout.segment_multiple)
    sizes = np.minimum(-(-tokens // layout.segment_multiple), room)
    costs = (cost(round_up(tokens, layout.segment_multiple)) + extra).tolist()
    positions, starts = (array.tolist() for array in best_fit(sizes, capacity=room))
    rows = [tuple(positions[start:stop]) for start, stop in pairwise(starts)]
    slots = _slots(len(rows), layout)
    shared = layout.data_size > 1 or slots > len(rows)
    spread = _spread(sizes.tolist(), costs, capacity=room, num_rows=slots) if shared else []
    return _deal_rows(spread or rows + [()] * (slots - len(rows)), costs, layout)


def best_fit(sizes: IntArray, *, capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of at most ``capacity``: longest first, each into the fullest row it still fits (best-fit decreasing).

    That is within 11/9 of the fewest rows (Johnson 1974). Examples of one length are placed together, and so are rows
    that are filled alike, so that the work hardly grows with their number.

    Args:
        sizes: [examples] each in 1 to ``capacity``.
        capacity: of a row.

    Returns:
        Positions row after row, ascending within a row; and where in them each row begins, and the last one ends.
    """
    first, number, each = np.array(_runs(np.bincount(sizes), capacity)).T
    # Sixteen bits are sorted by counting.
    keys = capacity - sizes
    longest_first = np.argsort(keys.astype(np.uint16) if capacity < 2**16 else keys, kind="stable")
    filled = np.repeat(first - np.cumsum(number) + number, number) + np.arange(number.sum())
    row_of = np.repeat(filled, np.repeat(each, number))
    positions = np.sort(row_of * len(sizes) + longest_first) % len(sizes)
    return positions, np.concatenate([[0], np.cumsum(np.bincount(row_of))])


def round_up(size: Size, multiple: int) -> Size:
    """The least multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def _runs(counts: IntArray, capacity: int) -> list[tuple[int, int, int]]:
    """(first row, rows, examples in each): what best fit puts where, the longest examples first.

    Args:
        counts: [lengths] examples of each length.
        capacity: of a row.
    """
    runs: list[tuple[int, int, int]] = []
    open_rows: list[tuple[int, int, int]] = []  # sorted: (room, first row, rows) of rows that are filled alike
    num_rows = 0
    lengths = np.flatnonzero(counts).tolist()
    for length in reversed(lengths):
        left = int(counts[length])
        while left:
            fullest = bisect_left(open_rows, (length,))
            if fullest < len(open_rows):
                room, first, number = open_rows.pop(fullest)
            else:
                room, first, number = capacity, num_rows, -(-left // (capacity // length))
                num_rows += number
            each = min(room // length, left)
            filled = min(number, left // each)
            runs.append((first, filled, each))
            left -= filled * each
            if room - each * length >= lengths[0]:
                insort(open_rows, (room - each * length, first, filled))
            if filled < number:
                insort(open_rows, (room, first + filled, number - filled))
    return runs


def _spread(sizes: Sequence[int], costs: Sequence[float], *, capacity: int, num_rows: int) -> list[Row]:
    """``num_rows`` rows of about equal cost: the costliest first, each into the cheapest row; none if one overflows."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    room = [capacity] * num_rows
    cheapest = [(0.0, row) for row in range(num_rows)]
    for position in sorted(range(len(sizes)), key=costs.__getitem__, reverse=True):
        while not room[cheapest[0][1]]:
            heappop(cheapest)
        cost, row = cheapest[0]
        if sizes[position] > room[row]:
            return []
        rows[row].append(position)
        room[row] -= sizes[position]
        heapreplace(cheapest, (cost + costs[position], row))
    return [tuple(sorted(row)) for row in rows]


def _deal_rows(rows: Sequence[Row], costs: Sequence[float], layout: Layout) -> tuple[RankPlan, ...]:
    return _deal([(row,) for row in rows], [sum(costs[p] for p in row) for row in rows], layout)


def _deal(micro_batches: Sequence[MicroBatchPlan], costs: Sequence[float], layout: Layout) -> tuple[RankPlan, ...]:
    """In rounds of one for each rank, the costliest first: ranks wait for each other after every micro-batch.

    Within a round the costliest goes to the rank that had the least so far.
    """
    plans: list[list[MicroBatchPlan]] = [[] for _ in range(layout.data_size)]
    loads = [0.0] * layout.data_size
    by_cost = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    for start in range(0, len(by_cost), layout.data_size):
        ranks = sorted(range(layout.data_size), key=loads.__getitem__)
        for rank, number in zip(ranks, by_cost[start : start + layout.data_size], strict=True):
            plans[rank].append(micro_batches[number])
            loads[rank] += costs[number]
    return tuple(map(tuple, plans))


def _slots(num_micro_batches: int, layout: Layout) -> int:
    """Micro-batches of all ranks together, fillers included."""
    return layout.data_size * round_up(-(-num_micro_batches // layout.data_size), layout.micro_batch_multiple)
