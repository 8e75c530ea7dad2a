"""Files of JSON become lines, one row each; and lines of tokenized rows become Arrow batches.

The types are those of each element, not of a column: 1 is an integer, 1.0 and true are not, wherever a row stands.
"""

import codecs
import io
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from burnish.data.validate import COLUMNS, FORBIDDEN, WHAT_TO_STORE, Place, describe_value
from burnish.errors import DataError
from burnish.storage.cache import private_folder

BLOCK = 1 << 22
"""Bytes of text that are in memory at a time."""
LONGEST_ROW = 1 << 26
"""Characters; an element of an array that does not end before is not searched for further."""
BLANK = b" \t\r\n" + codecs.BOM_UTF8
"""What a line without a row may hold: only a newline ends a line, U+2028 may stand inside text."""

_PACKED = {".gz": "gzip", ".zst": "zstd"}
_BETWEEN = re.compile(r"[\s,]*")
_ONE_A_LINE = "write one JSON object a line"


def read_lines(file: Path) -> Iterator[bytes]:
    """All lines of ``file`` with their ends, unpacked; of an array of objects each element, as one line.

    Raises:
        DataError: the file is damaged, or an array is no JSON.
    """
    with _open_text(file) as stream:
        yield from _elements(stream, file) if _is_array(stream) else stream


def mappable_lines(file: Path) -> tuple[Path, str]:
    """A file with the lines of ``file`` as they are, itself or what it holds written out; and what each of them is."""
    with _open_text(file) as stream:
        word = "element" if _is_array(stream) else "line"
    if word == "line" and file.suffix.lower() not in _PACKED:
        return file, word
    lines = private_folder() / "lines.jsonl"
    with lines.open("wb") as out:
        out.writelines(read_lines(file))
    return lines, word


def read_jsonl(file: Path) -> Iterator[pa.RecordBatch]:
    """The tokenized rows of ``file``.

    Raises:
        DataError: the file is damaged, a line is no JSON object, or an element is no integer.
    """
    rows: list[dict[str, Any]] = []
    first_row = size = 0
    for line in read_lines(file):
        if line.strip(BLANK):
            rows.append(_read_row(line, Place(file, first_row + len(rows))))
            size += len(line)
        if size >= BLOCK:
            yield _to_batch(rows)
            first_row, size, rows = first_row + len(rows), 0, []
    if rows:
        yield _to_batch(rows)


@contextmanager
def _open_text(file: Path) -> Iterator[io.BufferedReader]:
    codec = _PACKED.get(file.suffix.lower())
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(pa.OSFile(str(file)))
            unpacked = stack.enter_context(pa.CompressedInputStream(raw, codec)) if codec and raw.size() else raw
            yield stack.enter_context(io.BufferedReader(unpacked, BLOCK))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(str(file), f"is damaged or cut short ({error})", fix="write or copy it again") from error


def _is_array(stream: io.BufferedReader) -> bool:
    return stream.peek().lstrip(BLANK)[:1] == b"["


def _elements(stream: io.BufferedReader, file: Path) -> Iterator[bytes]:
    """Without ever holding the whole text."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")()
    text, number = utf8.decode(stream.read(BLOCK)), 0
    at = text.index("[") + 1
    while True:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text too
        if text[at : at + 1] == "]":
            break
        try:
            _, end = decoder.raw_decode(text, at)
        except ValueError as error:
            block = stream.read(BLOCK)
            if not block or len(text) - at > LONGEST_ROW:
                Place(file, number).reject(0, f"is no JSON ({error})", fix=_ONE_A_LINE)
            text, at = text[at:] + utf8.decode(block), 0
        else:
            # Inside a string no line ends, so these are between keys and values.
            yield text[at:end].replace("\n", " ").encode() + b"\n"
            at, number = end, number + 1
    if (text[at + 1 :] + utf8.decode(stream.read(BLOCK))).strip():
        raise DataError(str(file), "goes on after the end of its array", fix=_ONE_A_LINE)
    yield b"\n"


def _read_row(line: bytes, place: Place) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        place.reject(0, f"is no JSON ({error})", fix=_ONE_A_LINE)
    if not isinstance(row, dict):
        place.reject(0, f"is {describe_value(row)}, no JSON object", fix=_ONE_A_LINE)
    place.check_names(list(row))
    for name in WHAT_TO_STORE:
        if (values := row.get(name)) is not None:
            _check_integers(values, name, place)
    return row


def _check_integers(values: Any, name: str, place: Place) -> None:
    if not isinstance(values, list):
        place.reject_values(0, name, f"is {describe_value(values)}, no list of integers")
    # bool is a kind of int to isinstance, not to type.
    kinds = {int, bool} if name == "loss_mask" else {int}
    if set(map(type, values)) <= kinds and all(-(2**63) <= edge(values, default=0) < 2**63 for edge in (min, max)):
        return
    bad = next(value for value in values if type(value) not in kinds or not -(2**63) <= value < 2**63)
    place.reject_values(0, name, f"holds {describe_value(bad)} where integers belong")


def _to_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Columns that no row has are null throughout."""
    return pa.RecordBatch.from_pydict({name: _column(rows, name) for name in COLUMNS if name not in FORBIDDEN})


def _column(rows: list[dict[str, Any]], name: str) -> pa.Array:
    values = [row.get(name) for row in rows]
    if name not in WHAT_TO_STORE:  # images: whether there are any is all that is asked of them here
        return pa.array([[0] if value else None for value in values], pa.list_(pa.int8()))
    lengths = [len(value or ()) for value in values]
    flat = np.fromiter(chain.from_iterable(value or () for value in values), np.int64, sum(lengths))
    null = pa.array([value is None for value in values])
    return pa.LargeListArray.from_arrays(np.cumsum([0, *lengths]), flat, mask=null)
