import logging

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.data.formats import TOKENS_A_BATCH, Format, map_file, read_arrow, read_shard
from burnish.errors import DataError
from tests.data.stores import shards_of, to_table, write_arrow, write_shard
from tests.toys import row

ROWS = [row([n, n + 1], [0, 1]) for n in range(2500)]


def batches(file):
    (shard,) = shards_of(file)
    return list(read_shard(shard))


def test_shards_come_in_the_order_of_their_relative_paths(tmp_path):
    names = ["b.parquet", "a/2.parquet", "a/10.parquet", "a-1/x.parquet", "B.parquet", "é.parquet"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [shard.file.name for shard in shards_of(tmp_path)]
    assert found == ["B.parquet", "a-1/x.parquet", "a/10.parquet", "a/2.parquet", "b.parquet", "é.parquet"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a.parquet", Format.PARQUET),
        ("a.b.c000.snappy.PARQUET", Format.PARQUET),
        ("a.jsonl.zst", Format.JSONL),
        ("a.v2.json", Format.JSONL),
        ("a.arrow", Format.ARROW),
    ],
)
def test_formats_by_name(tmp_path, name, wanted):
    (tmp_path / name).touch()
    assert [shard.format for shard in shards_of(tmp_path / name)] == [wanted]


@pytest.mark.parametrize("name", ["a.csv", "a", "a.gz", "a.parquet.gz", "a.txt"])
def test_other_names_are_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"is none of the formats.*\n  fix: store rows as Parquet"):
        shards_of(tmp_path / name)


def test_a_folder_without_rows_says_what_it_holds(tmp_path):
    with pytest.raises(DataError, match=r"holds no rows \(no file at all\)"):
        shards_of(tmp_path)
    for name in ("a.csv", "b.csv", "LICENSE", "config.json"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"holds no rows \(2 \.csv, 1 \.json, 1 LICENSE\)"):
        shards_of(tmp_path)


def test_another_programs_state_is_a_sidecar(tmp_path):
    write_shard(tmp_path, 0, ROWS[:1], kind="parquet")
    (tmp_path / "state.json").write_text('{"step": 3}')
    assert [shard.file.name for shard in shards_of(tmp_path)] == ["part-000.parquet"]


@pytest.mark.parametrize("saved", [True, False])
def test_an_arrow_stream_needs_its_end(tmp_path, saved):
    """A stream that is cut after a whole batch, or after its schema, reads like a shorter one."""
    if saved:
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "store")
        (file,) = (tmp_path / "store").glob("*.arrow")
    else:
        file = write_arrow(tmp_path / "a.arrow", to_table(ROWS), kind="arrow stream", chunk=1000)
    whole = file.read_bytes()
    ends, source = [], pa.BufferReader(whole)
    stream = pa.ipc.open_stream(source)
    ends.append(source.tell())
    for _ in stream:
        ends.append(source.tell())
    ends[-1] -= 8 if ends[-1] == len(whole) else 0
    assert sum(map(len, batches(file))) == 2500
    for end in (*ends[:-1], len(whole) - 8, len(whole) - 4, len(whole) - 1):
        file.write_bytes(whole[:end])
        with pytest.raises(DataError, match=rf"{file.name}: is (damaged or )?cut short"):
            batches(file)


def test_two_streams_in_one_file_are_not_read_as_the_first(tmp_path):
    file = write_arrow(tmp_path / "a.arrow", to_table(ROWS), kind="arrow stream")
    file.write_bytes(file.read_bytes() * 2)
    with pytest.raises(DataError, match="where the file ends"):
        batches(file)


def test_a_bitmap_that_looks_like_an_end_is_none(tmp_path):
    """32 set bits of a boolean mask, padded, are the same eight bytes as the end of a stream."""
    table = to_table([row([1] * 32, [1] * 32)], mask="bool")
    file = write_arrow(tmp_path / "a.arrow", table, kind="arrow stream")
    whole = file.read_bytes()
    cut = whole[:-8].rstrip(b"\0")
    cut += b"\0" * (-len(cut) % 8)
    assert cut.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    file.write_bytes(cut + whole[len(cut) : -8])
    with pytest.raises(DataError, match="cut short"):
        batches(file)


def test_an_old_stream_ends_with_four_zeros(tmp_path):
    options = pa.ipc.IpcWriteOptions(use_legacy_format=True)
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), to_table(ROWS).schema, options=options) as writer:
        writer.write_table(to_table(ROWS))
    assert sum(map(len, batches(tmp_path / "a.arrow"))) == 2500


def test_mapped_files_outlive_their_names(tmp_path):
    file = write_arrow(tmp_path / "a.arrow", to_table(ROWS))
    mapped = map_file(file)
    file.unlink()
    assert sum(len(batch) for batch in read_arrow(mapped, file=file)) == 2500


def test_one_large_row_group_is_read_in_parts(tmp_path):
    size = 1000
    table = to_table([row([1] * size, [1] * size)] * 3000, ids="int32", mask="int8")
    pq.write_table(table, tmp_path / "a.parquet")
    found = batches(tmp_path / "a.parquet")
    assert sum(map(len, found)) == 3000
    assert max(map(len, found)) * size <= TOKENS_A_BATCH


def test_only_columns_that_decide_are_read(tmp_path):
    rows = [{**row([1, 2], [0, 1]), "text": "x", "meta": {"a": 1}, "attention_mask": [1, 1]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert batches(tmp_path / "a.parquet")[0].schema.names == ["input_ids", "loss_mask", "attention_mask"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl.gz", "jsonl.zst"])
def test_noise_is_named(tmp_path, suffix):
    (tmp_path / f"a.{suffix}").write_bytes(bytes(range(256)) * 10)
    with pytest.raises(DataError, match=rf"a\.{suffix}: is damaged or cut short"):
        batches(tmp_path / f"a.{suffix}")


def test_one_split_in_several_files_is_no_warning(tmp_path, caplog):
    for name in ("train-0", "train-1", "latest-2", "contest"):
        write_shard(tmp_path / "made", 0, ROWS[:1], kind="parquet").rename(tmp_path / f"{name}.parquet")
    (tmp_path / "made").rmdir()
    with caplog.at_level(logging.WARNING):
        assert len(shards_of(tmp_path)) == 4
    assert caplog.text == ""
