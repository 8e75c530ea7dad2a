"""B56: what Spark and Ray leave beside the rows is no rows."""

import pytest

from burnish.data.store import open_store
from tests.data.stores import contents, write_shard
from tests.toys import row

STRAY = [
    ".part-00000-ab.c000.snappy.parquet.crc",
    "_SUCCESS",
    "_metadata",
    "_common_metadata",
    "_temporary/0/part-9.parquet",
    "part-1.parquet._COPYING_",
    ".ipynb_checkpoints/x.parquet",
    "._part-0.parquet",
    "README.md",
    "dataset_info.json",
]


@pytest.mark.parametrize("folder", ["store", ".cache/tok", "_out"])
def test_exactly_the_two_real_parts(tmp_path, folder):
    store = tmp_path / folder
    store.mkdir(parents=True)
    for number, name in enumerate(("part-00000-ab.c000.snappy.parquet", "part-00001.gz.parquet")):
        write_shard(tmp_path / "made", 0, [row([1, 2 + number], [0, 1])], kind="parquet").rename(store / name)
    for name in STRAY:
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(b"stray")
    assert contents(open_store(store, name="s")) == [([1, 2], [0, 1]), ([1, 3], [0, 1])]
