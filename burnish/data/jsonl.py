"""JSON-lines become Arrow batches with the types that the text has: 1 is an integer, 1.0 and true are not.

The types are those of each element, not of a column, so the answer never depends on where a row stands.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa

from burnish.data.validate import COLUMNS, FORBIDDEN, WHAT_TO_STORE, Place, describe_value
from burnish.errors import DataError

BLOCK = 1 << 22
"""Bytes of text that are parsed at a time."""
LONGEST_ROW = 1 << 26
"""Characters; an element of an array that does not end before is not searched for further."""

Read: TypeAlias = Callable[[int], bytes]
_BETWEEN = re.compile(r"[\s,]*")
_ONE_A_LINE = "write one JSON object a line"


def read_jsonl(file: Path) -> Iterator[pa.RecordBatch]:
    """The rows of ``file``: one object a line, or one array of objects; .gz and .zst are unpacked on the way.

    Raises:
        DataError: the file is damaged, a line is no JSON object, or an element is no integer.
    """
    codec = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix.lower())
    first_row = 0
    try:
        with pa.OSFile(str(file)) as raw:
            stream = pa.CompressedInputStream(raw, codec) if codec and raw.size() else raw
            for rows in _parse(stream.read, file):
                if rows:
                    yield _to_batch(rows, Place(file, first_row))
                first_row += len(rows)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(str(file), f"is damaged or cut short ({error})", fix="write or copy it again") from error


def _parse(read: Read, file: Path) -> Iterator[list[Any]]:
    start = read(BLOCK).removeprefix(codecs.BOM_UTF8)
    return _parse_array(start, read, file) if start.lstrip()[:1] == b"[" else _parse_lines(start, read, file)


def _parse_lines(start: bytes, read: Read, file: Path) -> Iterator[list[Any]]:
    """Only a newline ends a line: U+2028 may stand inside text. Blank lines are no rows."""
    first_row = 0
    for block in _whole_lines(start, read):
        rows: list[Any] = []
        for line in block.split(b"\n"):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    Place(file, first_row).reject(len(rows), f"is no JSON ({error})", fix=_ONE_A_LINE)
        yield rows
        first_row += len(rows)


def _whole_lines(start: bytes, read: Read) -> Iterator[bytes]:
    rest = start
    while block := read(BLOCK):
        head, newline, tail = block.rpartition(b"\n")
        if newline:
            yield rest + head
            rest = b""
        rest += tail
    yield rest


def _parse_array(start: bytes, read: Read, file: Path) -> Iterator[list[Any]]:
    """The elements of one array, without ever holding the whole text."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")()
    text, rows, first_row = utf8.decode(start), [], 0
    at = text.index("[") + 1
    while True:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text too
        if text[at : at + 1] == "]":
            break
        try:
            row, at = decoder.raw_decode(text, at)
            rows.append(row)
        except ValueError as error:
            block = read(BLOCK)
            if not block or len(text) - at > LONGEST_ROW:
                Place(file, first_row).reject(len(rows), f"is no JSON ({error})", fix=_ONE_A_LINE)
            yield rows
            text, at, first_row, rows = text[at:] + utf8.decode(block), 0, first_row + len(rows), []
    yield rows
    if (text[at + 1 :] + utf8.decode(read(BLOCK))).strip():
        raise DataError(str(file), "goes on after the end of its array", fix=_ONE_A_LINE)


def _to_batch(rows: list[Any], place: Place) -> pa.RecordBatch:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            place.reject(number, f"is {describe_value(row)}, no JSON object", fix=_ONE_A_LINE)
        if found := [name for name in FORBIDDEN if name in row]:
            place.reject_column(number, found[0])
        if missing := [name for name in ("input_ids", "loss_mask") if name not in row]:
            place.reject(number, f"has no {missing[0]}", fix=WHAT_TO_STORE[missing[0]])
    present = [name for name in COLUMNS if any(name in row for row in rows)]
    return pa.RecordBatch.from_pydict({name: _column(rows, name, place) for name in present})


def _column(rows: list[dict[str, Any]], name: str, place: Place) -> pa.Array:
    values = [row.get(name) for row in rows]
    if name not in WHAT_TO_STORE:  # images: whether there are any is all that is asked of them here
        return pa.array([[0] if value else None for value in values], pa.list_(pa.int8()))
    allowed = (list, type(None))
    if bad := [n for n, value in enumerate(values) if not isinstance(value, allowed)]:
        problem = f"{name} is {describe_value(values[bad[0]])}, no list of integers"
        place.reject(bad[0], problem, fix=WHAT_TO_STORE[name])
    elements = list(chain.from_iterable(value or () for value in values))
    # bool is a kind of int to isinstance, not to type.
    kinds: set[type] = {int, bool} if name == "loss_mask" else {int}
    try:
        if not set(map(type, elements)) <= kinds:
            _reject_element(values, name, kinds, place)
        flat = np.fromiter(elements, np.int64, len(elements))
    except OverflowError:
        _reject_element(values, name, kinds, place)
    offsets = np.cumsum([0, *(len(value or ()) for value in values)])
    null = pa.array([value is None for value in values])
    return pa.LargeListArray.from_arrays(offsets, flat, mask=null)


def _reject_element(values: list[Any], name: str, kinds: set[type], place: Place) -> NoReturn:
    """Find the first element that is none of ``kinds`` or needs more than 64 bits."""
    for number, value in enumerate(values):
        for element in value or ():
            if type(element) not in kinds or not -(2**63) <= element < 2**63:
                problem = f"{name} holds {describe_value(element)} where integers belong"
                place.reject(number, problem, fix=WHAT_TO_STORE[name])
    raise AssertionError(f"every element of {name} is an integer")
