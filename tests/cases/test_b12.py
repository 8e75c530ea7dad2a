"""B12: shards without rows are skipped, files without bytes are damaged."""

import pytest

from burnish.data.store import open_store
from burnish.errors import DataError
from tests.data.stores import KINDS, contents, write_shard
from tests.toys import row

ONE = [row([1, 2], [0, 1])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_without_rows_is_skipped(tmp_path, kind):
    write_shard(tmp_path / "store", 0, [], kind=kind)
    write_shard(tmp_path / "store", 1, ONE, kind=kind)
    assert contents(open_store(tmp_path / "store", name="s")) == [([1, 2], [0, 1])]


@pytest.mark.parametrize("kind", KINDS)
def test_only_such_shards_are_no_store(tmp_path, kind):
    write_shard(tmp_path / "store", 0, [], kind=kind)
    write_shard(tmp_path / "store", 1, [], kind=kind)
    with pytest.raises(DataError, match="holds no rows"):
        open_store(tmp_path / "store", name="s")


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_text_without_bytes_is_skipped(tmp_path, suffix):
    write_shard(tmp_path / "store", 1, ONE, kind="jsonl")
    (tmp_path / "store" / f"part-000.{suffix}").touch()
    assert len(open_store(tmp_path / "store", name="s")) == 1


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
def test_other_files_without_bytes_are_named(tmp_path, kind):
    file = write_shard(tmp_path / "store", 1, ONE, kind=kind)
    empty = file.with_stem("part-000")
    empty.touch()
    for path in (tmp_path / "store", empty):
        with pytest.raises(DataError, match=rf"{empty.name}: is empty \(0 bytes\)"):
            open_store(path, name="s")
