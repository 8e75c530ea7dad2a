"""Planning: `python -m benchmarks.packing [rows=1000000] [capacity=4096]`, on one thread.

First all rows are packed at once, with their row numbers, beside TRL's `pack_dataset` where `trl` is installed; it moves
the tokens too, here of one byte each, and packs 1000 rows at a time as it does by default. Then the plan of a step of
8192 rows is made for more and more ranks; ranks wait for the slowest after every micro-batch, and the last column is
the share of their time that they do. The lengths are lognormal with a mean of 300; the cost is that of a 1.5 billion
parameter model. Seconds are the least of three turns, of CPU time.
"""

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from burnish.data.packing import Layout, best_fit, plan_bins

STEP_ROWS = 8192
RANKS = (1, 8, 64, 1024)
MEAN_LENGTH, SPREAD = 300, 1.0


def draw_lengths(rows: int, capacity: int) -> np.ndarray:
    sizes = np.random.default_rng(0).lognormal(np.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD, rows)
    return np.clip(sizes, 1, capacity).astype(np.int64)


def cost(lengths: np.ndarray) -> np.ndarray:
    """Operations of Qwen2.5-1.5B's layers: 1.31 billion weights, 28 layers of 12 heads of width 128."""
    return 6 * 1.31e9 * lengths + 12 * 28 * 12 * 128 * lengths.astype(float) ** 2 / 2


def timed(action: Callable[[], Any], turns: int = 3) -> tuple[float, Any]:
    """(CPU seconds, result)."""
    seconds = []
    for _ in range(turns):
        began = time.process_time()
        result = action()
        seconds.append(time.process_time() - began)
    return min(seconds), result


def pack_ours(lengths: np.ndarray, capacity: int) -> tuple[float, int]:
    """(CPU seconds, rows packed into)."""
    seconds, (_, starts) = timed(lambda: best_fit(lengths, capacity=capacity))
    return seconds, len(starts) - 1


def pack_with_trl(lengths: np.ndarray, capacity: int) -> tuple[float, int]:
    import datasets
    import pyarrow as pa
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int8)))
    rows = datasets.Dataset(pa.table({"input_ids": ids}))
    seconds, packed = timed(lambda: pack_dataset(rows, capacity, map_kwargs={"keep_in_memory": True}), turns=1)
    return seconds, len(packed)


def waiting(plans: Any, costs: list[float]) -> float:
    spent = np.array([[sum(costs[p] for row in m for p in row) for m in plan] for plan in plans])
    return 1 - spent.mean(axis=0).sum() / spent.max(axis=0).sum()


def main(arguments: list[str]) -> None:
    given = dict(argument.split("=", 1) for argument in arguments)
    rows, capacity = int(given.get("rows", 1_000_000)), int(given.get("capacity", 4096))
    lengths = draw_lengths(rows, capacity)
    sides = {"Burnish, with row numbers": pack_ours}
    if importlib.util.find_spec("trl"):
        sides["TRL, pack_dataset"] = pack_with_trl
    print(f"| {rows:,} rows into rows of {capacity} | seconds | packed rows | fill |\n|---|---|---|---|")
    for name, pack in sides.items():
        seconds, packed = pack(lengths, capacity)
        print(f"| {name} | {seconds:.3f} | {packed:,} | {lengths.sum() / packed / capacity:.3%} |")
    lengths = draw_lengths(min(rows, STEP_ROWS), capacity)
    print(f"\n| a step of {len(lengths):,} rows | ms | micro-batches a rank | waiting |\n|---|---|---|---|")
    for ranks in RANKS:
        layout = Layout(data_size=ranks)
        seconds, plans = timed(lambda layout=layout: plan_bins(lengths, capacity=capacity, layout=layout, cost=cost))
        share = waiting(plans, cost(lengths).tolist())
        print(f"| {ranks} ranks | {1000 * seconds:.1f} | {len(plans[0])} | {share:.1%} |")


if __name__ == "__main__":
    main(sys.argv[1:])
