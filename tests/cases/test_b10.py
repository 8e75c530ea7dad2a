"""B10: shards of different types agree by their values, never by a cast."""

from itertools import permutations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.data.mixture import Mixture
from burnish.data.store import open_store
from burnish.errors import DataError
from tests.data.stores import contents, write_arrow


def table(ids, mask, ids_type, mask_type):
    return pa.table({"input_ids": pa.array([ids], ids_type), "loss_mask": pa.array([mask], mask_type)})


GOOD = [
    table([1, 2], [0, 1], pa.list_(pa.int32()), pa.list_(pa.int8())),
    table([3, 4, 5], [0, 1, 1], pa.large_list(pa.int64()), pa.list_(pa.int64())),
    table([6, 40000], [True, True], pa.list_(pa.uint16()), pa.list_(pa.bool_())),
]
WANTED = [([1, 2], [0, 1]), ([3, 4, 5], [0, 1, 1]), ([6, 40000], [1, 1])]


def write(folder, tables, kind):
    folder.mkdir()
    for name, one in zip("abc", tables, strict=False):
        if kind == "parquet":
            pq.write_table(one, folder / f"{name}.parquet")
        else:
            write_arrow(folder / f"{name}.arrow", one)
    return folder


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_one_store_is_three_stores(tmp_path, kind, order):
    joined = open_store(write(tmp_path / "one", [GOOD[i] for i in order], kind), name="s")
    apart = Mixture([open_store(write(tmp_path / str(i), [GOOD[i]], kind), name=str(i)) for i in order])
    assert contents(joined) == contents(apart) == [WANTED[i] for i in order]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_two_is_never_true(tmp_path, kind, order):
    bools = table([1, 2], [False, True], pa.list_(pa.int64()), pa.list_(pa.bool_()))
    twos = table([1, 2, 3], [2, 1, 0], pa.list_(pa.int64()), pa.list_(pa.int64()))
    folder = write(tmp_path / "store", [(bools, twos)[i] for i in order], kind)
    name = "ab"[order.index(1)]
    with pytest.raises(DataError, match=rf"{name}\.{kind}, row 0: loss_mask must be 0/1, found 2"):
        open_store(folder, name="s")
