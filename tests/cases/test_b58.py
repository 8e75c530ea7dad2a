"""B58: JSON-lines odds and ends."""

import gzip

import pytest
import zstandard

from burnish.data.store import open_store
from burnish.errors import DataError
from tests.data.stores import contents
from tests.toys import row, write_jsonl, write_parquet

A = b'{"input_ids": [1, 2], "loss_mask": [0, 1]}'
B = b'{"input_ids": [3, 4], "loss_mask": [1, 1]}'
WANTED = [([1, 2], [0, 1]), ([3, 4], [1, 1])]
HARMLESS = {
    "byte-order mark": b"\xef\xbb\xbf" + A + b"\n" + B + b"\n",
    "CRLF": A + b"\r\n" + B + b"\r\n",
    "blank lines": b"\n\n" + A + b"\n\n   \n\t\r\n" + B + b"\n\n",
    "no final newline": A + b"\n" + B,
    "U+2028 in a string": A[:-1] + ', "text": "a\u2028b\u2029c\x85d"}'.encode() + b"\n" + B,
    "escapes in keys": A.replace(b"input_ids", b"input\\u005fids") + b"\n" + B,
    "a key twice, the last counts": b'{"input_ids": [9], ' + A[1:] + b"\n" + B,
    "one array": b"[" + A + b",\n " + B + b"]\n",
    "an array over lines": b"\xef\xbb\xbf\n[\n" + A.replace(b",", b",\n") + b"\n,\n" + B + b"\n]",
}


@pytest.mark.parametrize("name", list(HARMLESS))
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".ndjson"])
@pytest.mark.parametrize("block", [7, 1 << 22])
def test_harmless(tmp_path, monkeypatch, name, suffix, block):
    monkeypatch.setattr("burnish.data.jsonl.BLOCK", block)
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(suffix[-3:], zstandard.compress)
    text = HARMLESS[name]
    file = tmp_path / f"a{suffix}"
    file.write_bytes(pack(text) if suffix.endswith(("gz", "zst")) else text)
    assert contents(open_store(file, name="s")) == WANTED


def test_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(A)
    assert contents(open_store(tmp_path / "a.jsonl", name="s")) == WANTED[:1]


@pytest.mark.parametrize(
    ("text", "row_number"),
    [
        (A + b"\n{", 1),
        (A + b"\n" + A + B, 1),
        (A + b"\n5\n", 1),
        (b"[" + A + b", 5]", 1),
        (b"[" + A + b", " + B, 2),
        (b"[" + A + b"]\n[" + B + b"]", None),
        (A + b'\n{"input_ids": [1], "loss_mask": [1], "t": "\xff"}', 1),
        (b"[" + A + b', {"t": "\xff"}]', None),
        (b'{\n"input_ids": [1, 2],\n"loss_mask": [0, 1]\n}', 0),
    ],
)
@pytest.mark.parametrize("block", [7, 1 << 22])
def test_what_is_no_json_is_named(tmp_path, monkeypatch, text, row_number, block):
    monkeypatch.setattr("burnish.data.jsonl.BLOCK", block)
    (tmp_path / "a.jsonl").write_bytes(text)
    place = "a.jsonl: " if row_number is None else f"a.jsonl, row {row_number}: "
    with pytest.raises(DataError, match=place):
        open_store(tmp_path / "a.jsonl", name="s")


def test_two_formats_in_one_folder(tmp_path):
    rows = [row([1, 2], [0, 1])]
    for number in range(2):
        write_jsonl(tmp_path / "store" / f"{number}.jsonl", rows)
    write_parquet(tmp_path / "store" / "deep" / "2.parquet", rows)
    with pytest.raises(DataError, match="mixes formats: 2 JSON-lines files and 1 Parquet file"):
        open_store(tmp_path / "store", name="s")
