"""B62: a store whose rows are all dropped is an error that says why."""

import pytest

from burnish.config.choices import Truncation
from burnish.data.store import open_store
from burnish.errors import DataError
from tests.data.stores import KINDS, write_shard
from tests.toys import row

NORMAL = [row([1, 2, 3], [0, 1, 1]), row([4, 5], [0, 1]), row([6, 7, 8], [0, 0, 1])]


@pytest.mark.parametrize("kind", KINDS)
def test_totals_by_reason(tmp_path, kind):
    rows = [NORMAL[0], row([4, 5], [1, 0]), NORMAL[2]]
    file = write_shard(tmp_path, 0, rows, kind=kind)
    with pytest.raises(DataError, match=r"3 of 3 rows dropped: 2 too_long, 1 no_target\n  fix: raise max_length"):
        open_store(file, name="s", max_length=2, truncation=Truncation.DROP)


def test_cut_to_one_token(tmp_path):
    file = write_shard(tmp_path, 0, NORMAL, kind="jsonl")
    for _ in range(2):
        with pytest.raises(DataError, match="3 of 3 rows dropped: 3 no_target"):
            open_store(file, name="s", max_length=1)
    assert len(open_store(file, name="s", max_length=2)) == 2


def test_all_masks_zero(tmp_path):
    rows = [row(r["input_ids"], [0] * len(r["input_ids"])) for r in NORMAL]
    with pytest.raises(DataError, match="3 of 3 rows dropped: 3 no_target"):
        open_store(write_shard(tmp_path, 0, rows, kind="parquet"), name="s")
