import gzip
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.config.choices import Truncation
from burnish.data.manifest import Manifest, write_manifest
from burnish.data.store import open_store
from burnish.errors import DataError
from tests.data.stores import KINDS, NUM_EMBEDDINGS, contents, expected, to_table, write_arrow, write_shard
from tests.toys import row, write_jsonl, write_parquet

ROWS = [
    row([1, 2, 3], [0, 1, 1]),
    row([], []),
    row([4, 5], [1, 0]),
    row([6, 7, 8, 9, 10], [0, 0, 1, 0, 1]),
    row([11], [1]),
    row([12, 13], [0, 1]),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same(tmp_path, kind):
    write_shard(tmp_path / "store", 0, ROWS[:4], kind=kind)
    write_shard(tmp_path / "store", 1, ROWS[4:], kind=kind)
    store = open_store(tmp_path / "store", name="s", num_embeddings=NUM_EMBEDDINGS)
    assert contents(store) == [(ids, mask) for _, ids, mask in expected(ROWS)[0]]
    assert store.lengths.tolist() == [3, 5, 2]
    assert store.target_counts.tolist() == [2, 2, 1]
    assert store.num_patches.tolist() == [0, 0, 0]
    assert store[0].loss_mask.dtype == np.uint8
    assert (store.report.rows, store.report.kept, store.report.dropped) == (6, 3, {"no_target": 3})
    assert (store.report.tokens, store.report.targets) == (10, 5)
    places = [re.fullmatch(r".*/part-(\d+)\.[a-z.]+, row (\d+)", store.locate(i)).groups() for i in range(3)]
    assert places == [("000", "0"), ("000", "3"), ("001", "1")]


def test_fingerprint_is_of_the_rows_and_not_of_the_files(tmp_path):
    prints = set()
    for number, kind in enumerate(KINDS):
        types = {"ids": ["int32", "uint16", "int64"][number % 3], "mask": ["bool", "int8"][number % 2]}
        write_shard(tmp_path / kind / "deep", 0, ROWS, kind=kind, chunk=1 + number, **types)
        prints.add(open_store(tmp_path / kind, name=kind).fingerprint)
    assert len(prints) == 1
    write_shard(tmp_path / "two", 0, ROWS[:2], kind="jsonl")
    write_shard(tmp_path / "two", 1, ROWS[2:], kind="jsonl")
    assert {open_store(tmp_path / "two", name="two").fingerprint} == prints
    changed = [
        [row([1, 3, 2], [0, 1, 1]), *ROWS[1:]],
        [*ROWS[:-1], row([12, 13], [1, 1])],
        ROWS[::-1],
        [row([2, 2, 3], [0, 1, 1]), *ROWS[1:]],
        [*ROWS[:3], row([6, 7, 8, 9, 10], [0, 1, 0, 0, 1]), *ROWS[4:]],
    ]
    for number, rows in enumerate(changed):
        prints.add(open_store(write_jsonl(tmp_path / f"{number}.jsonl", rows), name="x").fingerprint)
    prints.add(open_store(tmp_path / "two", name="two", max_length=4).fingerprint)
    assert len(prints) == 1 + len(changed) + 1


TYPES = st.fixed_dictionaries(
    {
        "ids": st.sampled_from(["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]),
        "mask": st.sampled_from(["bool", "int8", "uint8", "int32", "int64", "uint64"]),
        "lists": st.sampled_from(["list", "large_list", "dictionary"]),
        "chunk": st.integers(1, 6),
    }
)
ROW = st.lists(st.tuples(st.integers(0, NUM_EMBEDDINGS - 1), st.integers(0, 1)), max_size=9).map(
    lambda pairs: row([p[0] for p in pairs], [p[1] for p in pairs])
)
SHARDS = st.lists(st.tuples(st.lists(ROW, max_size=6), TYPES), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shards=SHARDS,
    kind=st.sampled_from(KINDS),
    max_length=st.one_of(st.none(), st.integers(2, 8)),
    truncation=st.sampled_from([Truncation.RIGHT, Truncation.DROP]),
)
def test_random_stores_equal_the_obvious_reader(tmp_path_factory, shards, kind, max_length, truncation):
    folder = tmp_path_factory.mktemp("random")
    for number, (rows, types) in enumerate(shards):
        write_shard(folder / "store", number, rows, kind=kind, **types)
    rows = [r for rows, _ in shards for r in rows]
    kept, dropped = expected(rows, max_length=max_length, drop_long=truncation is Truncation.DROP)
    options = {"name": "s", "max_length": max_length, "truncation": truncation, "num_embeddings": NUM_EMBEDDINGS}
    if not kept:
        with pytest.raises(DataError, match=f"{len(rows)} of {len(rows)} rows dropped" if rows else "holds no rows"):
            open_store(folder / "store", cache_dir=folder / "cache", **options)
        return
    for _ in range(2):
        store = open_store(folder / "store", cache_dir=folder / "cache", **options)
        assert contents(store) == [(ids, mask) for _, ids, mask in kept]
        assert store.lengths.tolist() == [len(ids) for _, ids, _ in kept]
        assert store.target_counts.tolist() == [sum(mask[1:]) for _, _, mask in kept]
        assert store.report.dropped == dropped
        starts = np.cumsum([0] + [len(rows) for rows, _ in shards])
        for index, (number, _, _) in enumerate(kept):
            shard = int(np.searchsorted(starts, number, side="right")) - 1
            assert f"part-{shard:03d}." in store.locate(index)
            assert store.locate(index).endswith(f", row {number - starts[shard]}")


FAULTS = {
    "negative": lambda r: r["input_ids"].append(-1) or r["loss_mask"].append(0),
    "beyond the model": lambda r: r["input_ids"].append(NUM_EMBEDDINGS) or r["loss_mask"].append(0),
    "two": lambda r: r["input_ids"].append(3) or r["loss_mask"].append(2),
    "minus one": lambda r: r["input_ids"].append(3) or r["loss_mask"].append(-1),
    "short mask": lambda r: r["input_ids"].append(3),
    "long mask": lambda r: r["loss_mask"].append(1),
    "null ids": lambda r: r.update(input_ids=None),
    "null mask": lambda r: r.update(loss_mask=None),
    "null element": lambda r: r["input_ids"].append(None) or r["loss_mask"].append(0),
    "null in the mask": lambda r: r["input_ids"].append(3) or r["loss_mask"].append(None),
    "padding": lambda r: (
        r.update(attention_mask=[0] * len(r["input_ids"] + [1]), input_ids=[*r["input_ids"], 1])
        or r["loss_mask"].append(0)
    ),
    "long attention": lambda r: r.update(attention_mask=[1] * (len(r["input_ids"]) + 1)),
    "lone pixels": lambda r: r.update(pixel_values=[[0.5]]),
    "lone grid": lambda r: r.update(image_grid_thw=[[1, 2, 2]]),
    "too few pixels": lambda r: r.update(pixel_values=[[0.5]], image_grid_thw=[[1, 1, 2]]),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(ROW, min_size=1, max_size=12),
    fault=st.sampled_from(list(FAULTS)),
    kind=st.sampled_from(["parquet", "jsonl", "json array", "arrow file", "arrow stream"]),
    data=st.data(),
)
def test_one_bad_row_anywhere_is_named(tmp_path_factory, rows, fault, kind, data):
    rows = [row(list(r["input_ids"]), list(r["loss_mask"])) for r in rows]
    bad = data.draw(st.integers(0, len(rows) - 1))
    FAULTS[fault](rows[bad])
    folder = tmp_path_factory.mktemp("bad")
    write_shard(folder / "store", 0, [row([1, 2], [0, 1])], kind=kind)
    if "json" in kind:
        write_shard(folder / "store", 1, rows, kind=kind)
    else:
        names = sorted({name for r in rows for name in r})
        wide = {"pixel_values": pa.list_(pa.list_(pa.float32())), "image_grid_thw": pa.list_(pa.list_(pa.int64()))}
        schema = pa.schema([(name, wide.get(name, pa.list_(pa.int64()))) for name in names])
        table = pa.Table.from_pylist(rows, schema=schema)
        file = folder / "store" / f"part-001.{'parquet' if kind == 'parquet' else 'arrow'}"
        pq.write_table(table, file, row_group_size=2) if kind == "parquet" else write_arrow(file, table, kind=kind)
    with pytest.raises(DataError, match=rf"part-001\.\w+, row {bad}: .*\n  fix: \w+"):
        open_store(folder / "store", name="s", num_embeddings=NUM_EMBEDDINGS, cache_dir=folder / "cache")
    assert not list((folder / "cache" / "stores").glob("*/index-*"))


def test_truncation_error_names_the_row(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=r"a\.jsonl, row 3: has 5 tokens, more than max_length=3") as error:
        open_store(file, name="s", max_length=3, truncation=Truncation.ERROR)
    assert "drop" in error.value.fix
    assert len(open_store(file, name="s", max_length=5, truncation=Truncation.ERROR)) == 3


def test_drops_are_told_once_with_their_reasons(tmp_path, caplog):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with caplog.at_level(logging.INFO, "burnish.data.store"):
        open_store(file, name="mine", max_length=4, truncation=Truncation.DROP)
    assert [r.getMessage() for r in caplog.records] == ["mine: 4 of 6 rows dropped: 1 too_long, 3 no_target"]


@pytest.mark.parametrize("mask", ["uint8", "int8"])
def test_rows_are_views_of_the_mapped_file(tmp_path, mask):
    file = write_arrow(tmp_path / "a.arrow", to_table(ROWS, ids="uint16", mask=mask))
    store = open_store(file, name="s", cache_dir=tmp_path / "cache")
    first, again = store[0], store[0]
    assert first.input_ids.dtype == np.uint16
    assert first.input_ids.ctypes.data == again.input_ids.ctypes.data
    assert first.loss_mask.ctypes.data == again.loss_mask.ctypes.data
    assert not first.input_ids.flags.owndata
    assert not list((tmp_path / "cache").rglob("*.arrow")), "a plain Arrow file is read where it lies"


def test_lz4_is_converted_once(tmp_path):
    rows = [row(list(range(50)) * 20, [1] * 1000)] * 4
    file = write_arrow(tmp_path / "a.arrow", to_table(rows), kind="arrow lz4")
    store = open_store(file, name="s", cache_dir=tmp_path / "cache")
    (converted,) = (tmp_path / "cache").rglob("*.arrow")
    written = converted.stat().st_mtime_ns
    assert contents(store) == [(r["input_ids"], r["loss_mask"]) for r in rows]
    open_store(file, name="s", cache_dir=tmp_path / "cache", max_length=7)
    assert converted.stat().st_mtime_ns == written
    open_store(file, name="s", cache_dir=tmp_path / "cache", force_recache=True)
    (anew,) = (p for p in (tmp_path / "cache").rglob("*.arrow") if p != converted)
    assert anew.stat().st_mtime_ns > written
    assert contents(store) == [(r["input_ids"], r["loss_mask"]) for r in rows], "the old generation stays mapped"


def test_an_index_belongs_to_one_generation_of_converted_files(tmp_path, monkeypatch):
    """Another version of the writer may lay the same rows out otherwise."""
    file = write_parquet(tmp_path / "a.parquet", ROWS)
    wanted = contents(open_store(file, name="s", max_length=3))
    monkeypatch.setattr("burnish.data.index.TOKENS_A_BATCH", 2)
    open_store(file, name="s", force_recache=True)
    assert contents(open_store(file, name="s", max_length=3)) == wanted


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
def test_a_store_replaced_in_place_is_noticed(tmp_path, kind):
    file = write_shard(tmp_path / "store", 0, [row([1, 2], [0, 1])], kind=kind)
    before = file.stat()
    assert contents(open_store(tmp_path / "store", name="s")) == [([1, 2], [0, 1])]
    other = write_shard(tmp_path / "other", 0, [row([1, 3], [0, 1])], kind=kind)
    file.write_bytes(other.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert contents(open_store(tmp_path / "store", name="s")) == [([1, 3], [0, 1])]


def test_without_cache_nothing_stays(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", ROWS)
    script = (
        "import sys, tempfile; from pathlib import Path; from burnish.data.store import open_store\n"
        "s = open_store(Path(sys.argv[1]), name='s', disable_cache=True, cache_dir=Path(sys.argv[2]))\n"
        "assert len(s) == 3; assert len(list(Path(tempfile.gettempdir()).iterdir())) == 1"
    )
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    subprocess.run([sys.executable, "-c", script, file, tmp_path / "cache"], check=True, env=environment, timeout=60)
    assert not (tmp_path / "cache").exists()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_shards_without_rows_between_others(tmp_path):
    for number, rows in enumerate([[], ROWS[:1], [], [], ROWS[3:4], []]):
        write_shard(tmp_path / "store", number, rows, kind="arrow file")
    store = open_store(tmp_path / "store", name="s")
    assert [store.locate(i).rpartition("/")[2] for i in range(2)] == ["part-001.arrow, row 0", "part-004.arrow, row 0"]


def test_row_numbers_outside_are_index_errors(tmp_path):
    store = open_store(write_jsonl(tmp_path / "a.jsonl", ROWS), name="s")
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"row {index} of 3 rows"):
            store[index]


def _manifest(**changes):
    facts = {"rows": 6, "rows_read": 9, "dropped": {"no_assistant": 2, "no_target": 1}, "drop_examples": {}}
    facts |= {"tokens": 13, "targets": 6, "tokenizer_hash": "", "template_hash": "", "vocabulary_size": 100}
    facts |= {"special_tokens": {}, "max_length": None, "train_on_what": "", "notices": (), "checksums": {}}
    return Manifest(**(facts | changes))


def test_a_manifest_adds_the_raw_rows(tmp_path):
    write_shard(tmp_path / "store", 0, ROWS, kind="arrow file")
    write_manifest(tmp_path / "store", _manifest())
    report = open_store(tmp_path / "store", name="s").report
    assert (report.rows, report.kept, report.dropped) == (9, 3, {"no_assistant": 2, "no_target": 4})
    write_manifest(tmp_path / "store", _manifest(rows=7))
    with pytest.raises(DataError, match="holds 6 rows, its manifest says 7"):
        open_store(tmp_path / "store", name="s")


def test_image_columns_that_hold_nothing_are_text(tmp_path):
    table = to_table(ROWS).append_column("pixel_values", pa.nulls(6, pa.list_(pa.float32())))
    table = table.append_column("image_grid_thw", pa.array([[]] * 6, pa.list_(pa.int64())))
    assert len(open_store(write_arrow(tmp_path / "a.arrow", table), name="s")) == 3


def test_save_to_disk_reads_only_what_its_state_names(tmp_path):
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "store", num_shards=2)
    (tmp_path / "store" / "cache-123.arrow").write_bytes(
        (tmp_path / "store" / "data-00000-of-00002.arrow").read_bytes()
    )
    store = open_store(tmp_path / "store", name="s")
    assert contents(store) == [(ids, mask) for _, ids, mask in expected(ROWS)[0]]


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "arrow file", "arrow stream", "json array"])
def test_a_file_cut_short_is_named(tmp_path, kind):
    file = write_shard(tmp_path / "store", 0, ROWS * 50, kind=kind)
    whole = file.read_bytes()
    for size in (len(whole) - 1, len(whole) * 2 // 3, 5):
        file.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"part-000\.\S+(, row \d+)?: is (damaged or cut short|cut short|no JSON)"):
            open_store(tmp_path / "store", name="s")


def test_a_long_store_is_cut_into_stretches(tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.data.index.TOKENS_A_BATCH", 7)
    monkeypatch.setattr("burnish.data.jsonl.BLOCK", 40)
    for kind in KINDS:
        write_shard(tmp_path / kind, 0, ROWS * 30, kind=kind, chunk=1000)
        store = open_store(tmp_path / kind, name="s")
        assert contents(store) == [(ids, mask) for _, ids, mask in expected(ROWS * 30)[0]]
        assert store.locate(len(store) - 1).endswith("row 179")


def test_memory_does_not_grow_with_the_store(tmp_path):
    """Anonymous memory, at 1 and 8 times the rows."""
    script = (
        "import sys; from pathlib import Path; from burnish.data.store import open_store\n"
        "s = open_store(Path(sys.argv[1]), name='s'); s[len(s) - 1]\n"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('RssAnon')][0])"
    )
    offsets = pa.array(np.arange(1001) * 1000)
    flat = np.full(1_000_000, 7, np.int32), np.ones(1_000_000, np.int8)
    lists = [pa.LargeListArray.from_arrays(offsets, values) for values in flat]
    table = pa.table({"input_ids": lists[0], "loss_mask": lists[1]})
    used = []
    for times in (1, 16):
        file = write_arrow(tmp_path / f"{times}.arrow", pa.concat_tables([table] * times), chunk=1_000_000)
        done = subprocess.run([sys.executable, "-c", script, file], check=True, capture_output=True, timeout=60)
        used.append(int(done.stdout))
    assert used[1] - used[0] < 30_000, "80 MB more of tokens may not cost 30 MB more of memory"


def test_gzip_of_several_members_is_read_whole(tmp_path):
    file = write_shard(tmp_path / "store", 0, ROWS, kind="jsonl.gz")
    file.write_bytes(file.read_bytes() + gzip.compress(b'{"input_ids": [1, 2], "loss_mask": [0, 1]}\n'))
    assert contents(open_store(tmp_path / "store", name="s"))[-1] == ([1, 2], [0, 1])


def test_a_missing_store_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere: does not exist"):
        open_store(Path(tmp_path / "nowhere"), name="s")


def test_a_parquet_column_that_stands_twice_is_named(tmp_path):
    ids, mask = pa.array([[1, 2, 3]]), pa.array([[0, 1, 1]])
    table = pa.Table.from_arrays([ids, ids, mask], names=["input_ids", "input_ids", "loss_mask"])
    pq.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice\.parquet, row 0: has the column input_ids twice"):
        open_store(tmp_path / "twice.parquet", name="s")


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "arrow file"])
def test_a_shard_of_no_bytes_that_cannot_have_none_is_named(tmp_path, kind):
    write_shard(tmp_path / "store", 0, ROWS, kind=kind)
    file = write_shard(tmp_path / "store", 1, ROWS, kind=kind)
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"part-001\.\S+: is .*0 bytes"):
        open_store(tmp_path / "store", name="s")


def test_arrow_files_in_a_row_are_not_read_as_one_of_them(tmp_path):
    first = write_arrow(tmp_path / "a.arrow", to_table(ROWS)).read_bytes()
    second = write_arrow(tmp_path / "a.arrow", to_table(ROWS[:1])).read_bytes()
    for data in (first + first, first[:-300] + second[-300:]):
        (tmp_path / "a.arrow").write_bytes(data)
        with pytest.raises(DataError, match=r"a\.arrow: is damaged or cut short"):
            open_store(tmp_path / "a.arrow", name="s")


def test_a_cache_inside_the_store_is_refused_before_it_is_read_as_rows(tmp_path):
    write_shard(tmp_path / "store", 0, ROWS, kind="jsonl")
    with pytest.raises(DataError, match=r"store: holds the cache .*/store/cache\n  fix: set cache_dir"):
        open_store(tmp_path / "store", name="s", cache_dir=tmp_path / "store" / "cache")
    assert len(open_store(tmp_path / "store", name="s", cache_dir=tmp_path / "store" / ".cache")) == 3


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_shard(tmp_path / "store", 0, ROWS, kind="jsonl")
    assert len(open_store("~/store", name="s", cache_dir=tmp_path / "cache")) == 3


@pytest.mark.parametrize("parts", ["[{a}{a}]", "[,{a}]", "[{a},,{a}]", "[{a},]"])
def test_an_array_has_one_comma_between_two_rows(tmp_path, parts):
    (tmp_path / "a.json").write_text(parts.replace("{a}", '{"input_ids": [1, 2], "loss_mask": [0, 1]}'))
    with pytest.raises(DataError, match=r"a\.json, row \d: (is no JSON|has no comma)"):
        open_store(tmp_path / "a.json", name="s")
