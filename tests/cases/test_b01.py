"""B01: a mask set on position 0 is no target."""

import logging

import pytest

from burnish.data.store import open_store
from tests.data.stores import KINDS, contents, write_shard
from tests.toys import row

ROWS = [
    row([1, 2, 3], [1, 1, 1]),
    row([7, 8, 9], [1, 0, 0]),
    row([5], [1]),
    row([4, 5, 6], [1, 0, 1]),
    row([5091, 374, 8949, 220, 748], [0, 1, 1, 0, 1]),
]


@pytest.mark.parametrize("kind", KINDS)
def test_targets(tmp_path, kind, caplog):
    file = write_shard(tmp_path, 0, ROWS, kind=kind)
    with caplog.at_level(logging.INFO):
        store = open_store(file, name="s")
    assert store.target_counts.tolist() == [2, 1, 3]
    assert [store.locate(i).rpartition(" ")[2] for i in range(3)] == ["0", "3", "4"]
    assert [r.getMessage() for r in caplog.records] == ["s: 2 of 5 rows dropped: 2 no_target"]
    cut = open_store(file, name="s", max_length=2)
    assert contents(cut) == [([1, 2], [1, 1]), ([5091, 374], [0, 1])]
    assert cut.target_counts.tolist() == [1, 1]


def test_rows_of_the_documentation(tmp_path):
    rows = [row([5091, 374, 220, 8949, 13], [0, 0, 0, 1, 1]), row([5091, 374, 8949, 220, 748], [0, 1, 1, 0, 1])]
    assert open_store(write_shard(tmp_path, 0, rows, kind="jsonl"), name="s").target_counts.tolist() == [2, 3]
