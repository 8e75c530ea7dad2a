"""A JSON file as lines that can be read in any order: mapped where it is plain, written out as lines where it is not."""

import gzip
import json
import mmap
import shutil
import zlib
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import zstandard

from burnish.data.example import IntArray
from burnish.errors import DataError
from burnish.storage.cache import private_folder


class JsonLines:
    """The objects of one file of JSON lines, or of one JSON array; ``.gz`` and ``.zst`` too.

    A byte order mark, CRLF and blank lines are fine. Can be sent to another process.

    Raises:
        DataError: the file is empty, cut off, or no JSON array where it begins like one.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._word = "line"
        try:
            self._lines = self._plain_lines()
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise DataError(str(file), f"cannot be read ({error})", fix="write it again") from error
        self._map: mmap.mmap | None = None
        self._starts = _line_starts(self._data)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = int(self._starts[index])
        stop = self._data.find(b"\n", start)
        try:
            row = json.loads(self._data[start : stop if stop >= 0 else len(self._data)].decode("utf-8-sig"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            fix = "write one JSON object a line, in UTF-8"
            raise DataError(self.describe(index), f"is not JSON ({error})", fix=fix) from error
        if not isinstance(row, dict):
            raise DataError(self.describe(index), f"is not a JSON object: {row!r:.80}", fix="write one object a line")
        return row

    def describe(self, index: int) -> str:
        """File and line of row ``index``, counted from 1."""
        number = self._data[: self._starts[index]].count(b"\n") + 1
        return f"{self._file}, {self._word} {number}"

    def has_key(self, name: str) -> bool:
        """Whether any row has ``name``; reads rows only where the file has that text at all."""
        spellings = (json.dumps(name).encode(), json.dumps(name, ensure_ascii=False).encode())
        if not any(self._data.find(spelling) >= 0 for spelling in spellings):
            return False
        return any(name in self[i] for i in range(len(self)))

    @property
    def _data(self) -> mmap.mmap:
        if self._map is None:
            with self._lines.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map

    def _plain_lines(self) -> Path:
        with _decompressed(self._file) as stream:
            head = stream.read(4096)
        if not head:
            raise DataError(str(self._file), "is empty", fix="write it again, or take it out of the dataset")
        if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            self._word = "element"
            return _array_to_lines(self._file)
        if not self._file.name.lower().endswith((".gz", ".zst")):
            return self._file
        lines = private_folder() / "lines.jsonl"
        with _decompressed(self._file) as stream, lines.open("wb") as out:
            shutil.copyfileobj(stream, out, 1 << 20)
        return lines


def _decompressed(file: Path) -> IO[bytes]:
    if file.name.lower().endswith(".gz"):
        return cast(IO[bytes], gzip.open(file))
    if file.name.lower().endswith(".zst"):
        return cast(IO[bytes], zstandard.open(file))
    return file.open("rb")


def _array_to_lines(file: Path) -> Path:
    with _decompressed(file) as stream:
        text = stream.read()
    try:
        elements = json.loads(text.decode("utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        fix = "write one array of objects, or one object a line"
        raise DataError(str(file), f"is not a JSON array ({error})", fix=fix) from error
    lines = private_folder() / "elements.jsonl"
    lines.write_text("".join(json.dumps(element) + "\n" for element in elements) or "\n")
    return lines


def _line_starts(data: mmap.mmap) -> IntArray:
    """[rows] where each line that is not blank starts."""
    starts, start = [], 0
    while start < len(data):
        stop = data.find(b"\n", start)
        stop = stop if stop >= 0 else len(data)
        if data[start:stop].strip(b" \t\r\n\xef\xbb\xbf"):
            starts.append(start)
        start = stop + 1
    return np.asarray(starts, np.int64)
