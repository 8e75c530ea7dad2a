"""Raw rows are what their files say, in every format, and a wrong file is named."""

import gzip
import json
import os
from pathlib import Path

import datasets
import pytest
import zstandard

from burnish.data.rows import open_rows
from burnish.errors import DataError
from burnish.storage.transfer import fetch
from tests.toys import chat, write_jsonl, write_parquet

ROWS = [{"n": i, "text": f"t{i}"} for i in range(10)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def numbers(path, split=None):
    rows = open_rows(str(path), split=split, fetch=fetch)
    return [rows[i]["n"] for i in range(len(rows))]


def write(file: Path, data: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", LINES),
        ("a.json", LINES),
        ("a.json", json.dumps(ROWS, indent=2).encode()),
        ("A.JSONL", LINES),
        ("a.jsonl", b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\r\n  \r\n").rstrip()),
        ("a.json", b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode()),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("a.jsonl.zst", zstandard.compress(LINES)),
        ("a.jsonl.zst", zstandard.compress(LINES[:50]) + zstandard.compress(LINES[50:])),
        ("a.jsonl.gz", gzip.compress(LINES[:50], mtime=0) + gzip.compress(LINES[50:], mtime=0)),
        ("a b#%*?[x].jsonl", LINES),
    ],
)
@pytest.mark.parametrize("block", [7, 1 << 22])
def test_json_is_read_in_every_dress(tmp_path, monkeypatch, name, data, block):
    monkeypatch.setattr("burnish.data.jsonl.BLOCK", block)
    assert numbers(write(tmp_path / name, data)) == list(range(10))


def test_a_json_row_has_its_own_keys_and_no_other(tmp_path):
    mixed = [{"a": {"x": 1}}, {"a": {"y": None}, "b": "\u2028"}, {"content": "text"}, {"content": [{"type": "text"}]}]
    rows = open_rows(str(write_jsonl(tmp_path / "a.jsonl", mixed)), split=None, fetch=fetch)
    assert [rows[i] for i in range(4)] == mixed
    assert rows.column_names == ("a",)
    assert rows.has_column("b")
    assert not rows.has_column("y")


def test_parquet_folders_and_saved_datasets(tmp_path):
    write_parquet(tmp_path / "p" / "b" / "1.parquet", ROWS[5:])
    write_parquet(tmp_path / "p" / "a.parquet", ROWS[:5])
    write(tmp_path / "p" / "_skipped.jsonl", b"not json")
    write(tmp_path / "p" / ".hidden" / "x.jsonl", b"not json")
    write(tmp_path / "p" / "README.md", b"#")
    write(tmp_path / "p" / "dataset_infos.json", b"{}")
    assert numbers(tmp_path / "p") == list(range(10))
    assert open_rows(str(tmp_path / "p"), split=None, fetch=fetch).describe(7) == f"{tmp_path}/p/b/1.parquet, row 2"
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "s")
    assert numbers(tmp_path / "s", "train[2:4]") == [2, 3]
    both = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "d")
    assert numbers(tmp_path / "d", "test") == [0, 1]
    assert numbers(tmp_path / "d") == list(range(10))


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        (None, range(10)),
        ("train", range(10)),
        ("train[:3]", range(3)),
        ("train[-2:]", (8, 9)),
        ("train[10%:30%]", (1, 2)),
        ("train[:1]+train[7:9]", (0, 7, 8)),
        ("train[:100]", range(10)),
    ],
)
def test_split_slices(tmp_path, split, wanted):
    assert numbers(write(tmp_path / "a.jsonl", LINES), split) == list(wanted)


def test_files_named_after_splits_are_told_apart(tmp_path):
    write_jsonl(tmp_path / "data" / "train-00000-of-00001.jsonl", ROWS[:6])
    write_jsonl(tmp_path / "data" / "test-00000-of-00001.jsonl", ROWS[6:])
    assert numbers(tmp_path, "train") == list(range(6))
    assert numbers(tmp_path, "test") == [6, 7, 8, 9]
    write_jsonl(tmp_path / "data" / "extra.jsonl", ROWS)
    with pytest.raises(DataError, match=r"splits: test, train, but not extra\.jsonl"):
        open_rows(str(tmp_path), split="train", fetch=fetch)


def test_folders_named_after_splits_as_on_the_hub(tmp_path):
    write_jsonl(tmp_path / "training" / "a.jsonl", ROWS[:6])
    write_jsonl(tmp_path / "dev" / "a.jsonl", ROWS[6:7])
    write_jsonl(tmp_path / "eval" / "a.jsonl", ROWS[7:])
    assert [numbers(tmp_path, split) for split in ("validation", "test")] == [[6], [7, 8, 9]]
    assert numbers(tmp_path) == list(range(6))


def test_a_folder_of_one_split_is_train_whatever_its_name(tmp_path):
    write_jsonl(tmp_path / "test.jsonl", ROWS)
    assert numbers(tmp_path, "train[:2]") == [0, 1]


@pytest.mark.parametrize("path", ["/no/such/place", "$HOME/data.jsonl", "~/data", "data.jsonl", "a/b/c", "./x"])
def test_a_missing_path_is_said(path):
    with pytest.raises(DataError, match="no such path"):
        open_rows(path, split=None, fetch=fetch)


def test_a_hub_id_is_asked_for(monkeypatch):
    with pytest.raises(DataError, match="the hub has nothing"):
        open_rows("nobody/nothing", split="train", fetch=fetch)

    def load(path, *, split):
        assert (path, split) == ("some/rows", "train[:3]")
        return datasets.Dataset.from_list(ROWS[:3])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert numbers("some/rows", "train[:3]") == [0, 1, 2]
    monkeypatch.setattr(datasets, "load_dataset", lambda path, *, split: {"a": datasets.Dataset.from_list(ROWS)})
    assert numbers("some/rows") == list(range(10))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", LINES[:-5], r"a\.jsonl, line 10: is no JSON"),
        ("a.jsonl", b'{"n": 1}\n\n[1, 2]\n', r"a\.jsonl, line 3: is no JSON object: \[1, 2\]"),
        ("a.jsonl", b'{"n": 1}\n{"n": "\xff"}\n', r"a\.jsonl, line 2: is no JSON"),
        ("a.json", b'[{"n": 1}, 5]', r"a\.json, element 2: is no JSON object: 5"),
        ("a.json", b'[{"n": 1}', r"a\.json, row 1: is no JSON"),
        ("a.jsonl", b"", r"a\.jsonl: is empty"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], r"a\.jsonl\.gz: is damaged or cut short"),
        ("a.jsonl.zst", b"not zstandard", r"a\.jsonl\.zst: is damaged or cut short"),
        ("a.parquet", b"PAR1", r"a\.parquet: is damaged or cut short"),
        ("a.csv", b"n\n1\n", "is none of the formats that are read"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, name, data, message):
    with pytest.raises(DataError, match=message):
        numbers(write(tmp_path / name, data))


def test_wrong_splits_and_mixed_formats(tmp_path):
    file = write(tmp_path / "a.jsonl", LINES)
    with pytest.raises(DataError, match=r"split 'test'.*\n.*it has train"):
        open_rows(str(file), split="test", fetch=fetch)
    with pytest.raises(DataError, match=r"split 'train\[3'"):
        open_rows(str(file), split="train[3", fetch=fetch)
    write_parquet(tmp_path / "b.parquet", ROWS)
    with pytest.raises(DataError, match="mixes formats: 1 JSON-lines file and 1 Parquet file"):
        open_rows(str(tmp_path), split=None, fetch=fetch)
    both = {"a": datasets.Dataset.from_list(ROWS), "b": datasets.Dataset.from_list(ROWS)}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match="has the splits a, b"):
        open_rows(str(tmp_path / "d"), split=None, fetch=fetch)


def test_the_fingerprint_is_of_the_content(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [chat("q", "a")])
    stat = file.stat()
    before = open_rows(str(file), split="train", fetch=fetch)
    write_jsonl(file, [chat("q", "b")])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = open_rows(str(file), split="train", fetch=fetch)
    assert before.fingerprint != after.fingerprint
    assert after[0] == chat("q", "b")
    write_jsonl(file, [chat("q", "a")])
    assert open_rows(str(file), split=None, fetch=fetch).fingerprint == before.fingerprint
    assert open_rows(str(file), split="train[:0]", fetch=fetch).fingerprint != before.fingerprint
