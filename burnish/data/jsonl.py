"""Files of JSON become lines, one row each; and lines of tokenized rows become Arrow batches.

The types are those of each element, not of a column: 1 is an integer, 1.0 and true are not, wherever a row stands.
"""

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from burnish.data.images import IMAGE_COLUMNS, IMAGE_TYPES, from_json
from burnish.data.validate import COLUMNS, WHAT_TO_STORE, Place, describe_value
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
_PLAIN = ["input_ids", "loss_mask"]


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
    rows: list[Mapping[str, Any]] = []
    first_row = size = 0
    read_plain_row = _plain_row_reader()
    for line in read_lines(file):
        if line.strip(BLANK):
            rows.append(read_plain_row(line) or _read_row(line, Place(file, first_row + len(rows))))
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
            if codec and not raw.size():  # what has no rows is packed in some bytes all the same
                raise OSError("0 bytes")
            unpacked = stack.enter_context(pa.CompressedInputStream(raw, codec)) if codec else raw
            yield stack.enter_context(io.BufferedReader(unpacked, BLOCK))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(str(file), f"is damaged or cut short ({error})", fix="write or copy it again") from error


def _is_array(stream: io.BufferedReader) -> bool:
    return stream.peek().lstrip(BLANK)[:1] == b"["


def _elements(stream: io.BufferedReader, file: Path) -> Iterator[bytes]:
    """Without ever holding the whole text."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")()
    text, number = utf8.decode(stream.read(BLOCK)), 0
    at, commas = text.index("[") + 1, 0
    while True:
        between = _BETWEEN.match(text, at)
        assert between is not None, "it matches the empty text too"
        at, commas = between.end(), commas + between.group().count(",")
        if text[at : at + 1] == "]" and not commas:
            break
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            block = stream.read(BLOCK)
            if not block or len(text) - at > LONGEST_ROW:
                Place(file, number).reject(0, f"is no JSON ({error})", fix=_ONE_A_LINE)
            text, at = text[at:] + utf8.decode(block), 0
        else:
            if commas != min(number, 1):
                Place(file, number).reject(0, "has no comma, or more than one, before it", fix=_ONE_A_LINE)
            # Inside a string no line ends, so these are between keys and values.
            yield text[at:end].replace("\n", " ").encode() + b"\n"
            at, number, commas = end, number + 1, 0
    if (text[at + 1 :] + utf8.decode(stream.read(BLOCK))).strip():
        raise DataError(str(file), "goes on after the end of its array", fix=_ONE_A_LINE)
    yield b"\n"


def _plain_row_reader() -> Callable[[bytes], Mapping[str, Any] | None]:
    """Of a line the two arrays where it holds nothing else to look at; of any other ``None``, for ``_read_row`` to judge."""
    try:
        import simdjson
    except ImportError:  # without the extra "fast" all lines take the exact way
        return lambda line: None
    parser = simdjson.Parser()

    def read(line: bytes) -> Mapping[str, Any] | None:
        if line.count(b"[") != len(_PLAIN):  # as_buffer would flatten nested ones
            return None
        try:
            row: Any = parser.parse(line)
            if sorted(name for name in row if name in COLUMNS) != _PLAIN:
                return None
            return {name: np.frombuffer(row[name].as_buffer(of_type="i"), np.int64) for name in _PLAIN}
        except (AttributeError, RuntimeError, TypeError, ValueError):  # no object, no arrays, not all integers
            return None

    return read


def _read_row(line: bytes, place: Place) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        place.reject(0, f"is no JSON ({error})", fix=_ONE_A_LINE)
    if not isinstance(row, dict):
        place.reject(0, f"is {describe_value(row)}, no JSON object", fix=_ONE_A_LINE)
    place.check_names(list(row))
    for name in WHAT_TO_STORE:
        if (values := row.get(name)) is not None:
            _check_integers(values, name, place)
    for name in set(IMAGE_COLUMNS) & set(row):
        row[name] = from_json(row[name], name=name, place=place)
    return row


def _check_integers(values: Any, name: str, place: Place) -> None:
    if not isinstance(values, list):
        place.reject_values(0, name, f"is {describe_value(values)}, no list of integers")
    # bool is a kind of int to isinstance, not to type.
    kinds = {int, bool} if name == "loss_mask" else {int}
    if set(map(type, values)) <= kinds and all(-(2**63) <= edge(values, default=0) < 2**63 for edge in (min, max)):
        return
    bad = next(value for value in values if type(value) not in kinds or not -(2**63) <= value < 2**63)
    if type(bad) is int:
        place.reject_values(0, name, f"holds an integer of more than 64 bits ({bad})")
    place.reject_values(0, name, f"holds {describe_value(bad)} where integers belong")


def _to_batch(rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """The columns that any of the rows has; those of images always, so that all batches are alike."""
    names: set[str] = set(IMAGE_COLUMNS).union(*rows)
    return pa.RecordBatch.from_pydict({name: _column(rows, name) for name in COLUMNS if name in names})


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> pa.Array:
    values = [row.get(name) for row in rows]
    if name in IMAGE_COLUMNS:
        return pa.array(values, IMAGE_TYPES[name])
    arrays = [np.asarray(() if value is None else value, np.int64) for value in values]
    offsets = np.cumsum([0, *map(len, arrays)])
    return pa.LargeListArray.from_arrays(offsets, np.concatenate(arrays), mask=pa.array([v is None for v in values]))
