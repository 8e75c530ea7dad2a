"""A distribution of lengths becomes a store of random tokens."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from burnish.data.random_rows import random_tokens


def draw_lengths(kind: str, *, count: int, mean: int, cv: float, longest: int) -> NDArray[np.int64]:
    """[count] tokens of each row, the same each time.

    Args:
        kind: ``lognormal`` or ``fixed``.
        count: rows.
        mean: tokens of a row, before those above ``longest`` are cut.
        cv: standard deviation by mean, of ``lognormal``.
        longest: tokens a row has at most; at least it has 2.
    """
    if kind == "fixed":
        return np.full(count, np.clip(mean, 2, longest))
    spread = np.sqrt(np.log1p(cv**2))
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return np.clip(np.rint(drawn), 2, longest).astype(np.int64)


def write_rows(file: Path, lengths: NDArray[np.int64], *, vocabulary: int, target_share: float) -> None:
    """Write a store of rows of ``lengths``; the last ``target_share`` of each, at least one token, are targets."""
    stops = np.cumsum(lengths)
    left = np.repeat(stops, lengths) - np.arange(stops[-1])
    targets = np.maximum(1, np.rint(target_share * lengths)).repeat(lengths)
    columns = {
        "input_ids": random_tokens(int(stops[-1]), vocabulary=vocabulary, seed=1),
        "loss_mask": (left <= targets).astype(np.uint8),
    }
    bounds = pa.array(np.concatenate([[0], stops]))
    table = pa.table({name: pa.LargeListArray.from_arrays(bounds, pa.array(c)) for name, c in columns.items()})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
