"""Equal rows have equal hashes wherever they lie; others have others."""

import numpy as np
import pytest

from burnish.data.store import open_store
from tests.data.stores import KINDS, write_shard
from tests.toys import row, write_jsonl

LONG = list(range(5, 105))
ROWS = [row([4, 5, 6], [0, 1, 1]), row([7, 9], [0, 1]), row(LONG, [1] * 100), row([9, 8, 7, 6], [0, 0, 0, 1])]


def hashes(path):
    return open_store(path, name="rows").row_hashes()


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_and_order_gives_the_same(tmp_path, kind):
    expected = hashes(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    assert len(set(expected.tolist())) == len(ROWS)
    write_shard(tmp_path / "store", 0, ROWS[::-1], kind=kind)
    write_shard(tmp_path / "store", 1, ROWS[:2], kind=kind)
    found = hashes(tmp_path / "store")
    np.testing.assert_array_equal(found, [*expected[::-1], *expected[:2]])


@pytest.mark.parametrize(
    "other",
    [
        row([3, *LONG[1:]], [1] * 100),
        row([*LONG[:31], 3, *LONG[32:]], [1] * 100),
        row([*LONG[:68], 3, *LONG[69:]], [1] * 100),
        row([*LONG[:-1], 3], [1] * 100),
        row(LONG[:-1], [1] * 99),
        row(LONG, [1] * 50 + [0] + [1] * 49),
        row([LONG[1], LONG[0], *LONG[2:]], [1] * 100),
    ],
    ids=["first id", "32nd id", "32nd last id", "last id", "length", "targets", "order"],
)
def test_what_differs_has_another_hash(tmp_path, other):
    one, two = hashes(write_jsonl(tmp_path / "rows.jsonl", [row(LONG, [1] * 100), other]))
    assert one != two


def test_the_middle_of_a_long_row_is_not_looked_at(tmp_path):
    other = row([*LONG[:50], 3, *LONG[51:]], [1] * 100)
    one, two = hashes(write_jsonl(tmp_path / "rows.jsonl", [row(LONG, [1] * 100), other]))
    assert one == two


def test_many_rows_are_hashed_in_parts(tmp_path, monkeypatch):
    many = [row([4 + i, 5, 6 + i][: 2 + i % 2], [1] * (2 + i % 2)) for i in range(50)]
    path = write_jsonl(tmp_path / "rows.jsonl", many)
    whole = hashes(path)
    monkeypatch.setattr("burnish.data.store._ROWS_AT_ONCE", 7)
    np.testing.assert_array_equal(hashes(path), whole)
