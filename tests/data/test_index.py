import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from burnish.config.choices import Truncation
from burnish.data import index
from burnish.data.store import open_store
from burnish.errors import DataError
from tests.data.stores import contents, expected, to_table, write_arrow, write_shard
from tests.toys import row

ROWS = [row([n, n + 1, 7], [0, n % 2, 1]) for n in range(40)]
SCRIPT = """
from burnish.data import index
from burnish.data.store import open_store
index.BYTES_WORTH_PROCESSES = 0
print(len(open_store({store!r}, name="s", cache_dir={cache!r})))
"""


@pytest.fixture(params=["jsonl", "parquet", "arrow lz4"])
def kind(request, monkeypatch):
    """A format whose shards are converted several at a time, JSON in processes of its own."""
    monkeypatch.setattr(index, "BYTES_WORTH_PROCESSES", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return request.param


def test_shards_keep_their_order(tmp_path, kind):
    for number in range(4):
        write_shard(tmp_path / "store", number, ROWS[number * 10 : number * 10 + 10], kind=kind)
    store = open_store(tmp_path / "store", name="s")
    assert contents(store) == [(ids, mask) for _, ids, mask in expected(ROWS)[0]]
    assert "part-002." in store.locate(25)
    assert store.locate(25).endswith(", row 5")


def test_of_several_bad_rows_the_first_is_named(tmp_path, kind):
    write_shard(tmp_path / "store", 0, ROWS * 100, kind=kind)
    write_shard(tmp_path / "store", 1, [*ROWS * 50, row([1], [2]), row([1, 2], [0, 3])], kind=kind)
    write_shard(tmp_path / "store", 2, [row([1], [4])], kind=kind)
    with pytest.raises(DataError, match=r"part-001\.\w+, row 2000: loss_mask must be 0/1, found 2"):
        open_store(tmp_path / "store", name="s")


def test_a_script_without_a_main_guard_goes_on_alone(tmp_path):
    for number in range(2):
        write_shard(tmp_path / "store", number, ROWS, kind="jsonl")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(store=str(tmp_path / "store"), cache=str(tmp_path / "cache")))
    environment = {**os.environ, "PYTHONPATH": str(Path(index.__file__).parents[2])}
    command = [sys.executable, script]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100, env=environment)
    assert run.stdout == "80\n"
    assert "going on in this one; guard your script with `if __name__ == '__main__':`" in run.stderr


def fingerprint(file, **options):
    return open_store(file, name="s", **options).fingerprint


def test_large_ids_count_in_the_fingerprint(tmp_path):
    rows = [row([1, 2**40 + 3, 5], [0, 1, 1]), row([6, 7], [0, 1]), row([2**40, 8], [0, 1])]
    prints = {
        fingerprint(write_arrow(tmp_path / f"{ids} {chunk}.arrow", to_table(rows, ids=ids), chunk=chunk))
        for ids in ("int64", "uint64")
        for chunk in (1, 2, 3)
    }
    assert len(prints) == 1
    for number, moved in enumerate(([1, 3, 2**40 + 5], [1, 2**41 + 3, 5], [1, 3, 5])):
        table = to_table([row(moved, [0, 1, 1]), *rows[1:]])
        prints.add(fingerprint(write_arrow(tmp_path / f"{number}.arrow", table)))
    assert len(prints) == 4


def test_where_rows_end_counts_in_the_fingerprint(tmp_path):
    one = [row([1, 2, 3], [0, 1, 0]), row([4, 5], [1, 1])]
    other = [row([1, 2], [0, 1]), row([3, 4, 5], [0, 1, 1])]
    files = [write_arrow(tmp_path / f"{n}.arrow", to_table(rows)) for n, rows in enumerate((one, other))]
    assert len({fingerprint(file, max_length=2) for file in files}) == 2


def test_rows_that_are_dropped_do_not_count_in_the_fingerprint(tmp_path):
    kept, empty = ROWS[:6], row([1, 2], [1, 0])
    mixed = [empty, *kept[:2], empty, empty, *kept[2:], empty]
    files = [write_arrow(tmp_path / f"{n}.arrow", to_table(rows)) for n, rows in enumerate((kept, mixed, mixed[::-1]))]
    prints = [fingerprint(file) for file in files]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("mask", ["bool", "int8", "uint64"])
@pytest.mark.parametrize("truncation", [Truncation.RIGHT, Truncation.DROP])
def test_targets_of_long_rows_are_counted(tmp_path, mask, truncation):
    """Beyond what the narrow sum of short rows could hold."""
    random = np.random.default_rng(0)
    lengths = [70_000, 0, 1, 2, 66_000, 3, 70_000]
    rows = [row([1] * length, random.integers(0, 2, length).tolist()) for length in lengths] + [row([1] * 9, [1] * 9)]
    rows[4]["loss_mask"] = [1] * 66_000
    file = write_arrow(tmp_path / "a.arrow", to_table(rows, mask=mask), chunk=5)
    for limit in (None, 67_000, 2):
        kept, _ = expected(rows, max_length=limit, drop_long=truncation is Truncation.DROP)
        if kept:
            store = open_store(file, name="s", max_length=limit, truncation=truncation)
            assert store.target_counts.tolist() == [sum(mask[1:]) for _, _, mask in kept]


def test_an_empty_batch_is_passed_over(tmp_path):
    tables = [to_table(ROWS[:2]), to_table(ROWS[:2]).slice(0, 0), to_table(ROWS[2:4])]
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), tables[0].schema) as writer:
        for table in tables:
            batch = pa.record_batch([column.combine_chunks() for column in table.columns], names=table.column_names)
            writer.write_batch(batch)
    assert len(open_store(tmp_path / "a.arrow", name="s")) == 4
