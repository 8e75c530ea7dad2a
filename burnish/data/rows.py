"""Raw rows of a dataset, wherever it lies: JSON lines, Parquet, ``save_to_disk``, a bucket, the hub.

The rule: a row is what its file says. JSON is read as JSON, never through a table that would invent keys.
"""

import hashlib
import json
import mmap
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from burnish.data.formats import SUFFIXES, Fetch, Format, Shard, damage_named, data_files, source_named, split_of
from burnish.data.jsonl import BLANK, mappable_lines
from burnish.errors import DataError
from burnish.storage.files import File, canonical, file_digest, is_remote, list_files


class RawRows(ABC):
    """Rows before tokenization, in the order of the dataset. Can be sent to another process."""

    nulls_are_padding = True
    """Whether a null inside a nested value may only mean that some other row has that key."""

    def __init__(self, *, fingerprint: str, column_names: Iterable[str]) -> None:
        self.fingerprint = fingerprint
        """Changes with the content."""
        self.column_names = tuple(column_names)
        """Of the first row, or of the schema."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row ``index``, 0 to ``len`` - 1.

        Raises:
            DataError: its text is not a JSON object.
        """

    @abstractmethod
    def describe(self, index: int) -> str:
        """File and row of ``index``, for messages."""

    def has_column(self, name: str) -> bool:
        """Whether any row has ``name``."""
        return name in self.column_names


def open_rows(path: str, *, split: str | None, fetch: Fetch) -> RawRows:
    """The raw rows of ``path``: a file or folder, local or in a bucket, or else a dataset id of the hub.

    Args:
        path: JSON lines or a JSON array (also .gz, .zst), Parquet, a folder of one of these, a ``save_to_disk`` folder,
            or a hub id.
        split: as in ``datasets``, such as ``train[:100]``; ``None`` is the only split, or ``train``. Files
            are ``train`` unless their names speak of several splits.
        fetch: brings files of a bucket to this machine.

    Raises:
        DataError: nothing is there, it cannot be read, or it has no such split.
        StorageError: a bucket cannot be read.
    """
    if is_remote(path) or Path(path).expanduser().exists():
        files = list_files(canonical(path))
        saved = {"dataset_dict.json", "dataset_info.json"} & {file.name for file in files}
        splits = (_saved_splits if saved else _file_splits)(canonical(path), files, fetch)
    else:
        splits = _hub_splits(path, split)
        if split is not None:
            return splits[split]
    if split is None and len(splits) > 1 and "train" not in splits:
        raise DataError(path, f"has the splits {', '.join(splits)}", fix="name one of them")
    return _resolve(path, split or ("train" if "train" in splits else next(iter(splits))), splits)


class _Ranges(RawRows):
    """Ranges of other rows, one after the other."""

    def __init__(self, parts: Sequence[tuple[RawRows, int, int]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(stop - start for _, start, stop in parts))
        self.nulls_are_padding = any(rows.nulls_are_padding for rows, _, _ in parts)
        texts = [f"{rows.fingerprint}[{start}:{stop}]" for rows, start, stop in parts]
        super().__init__(
            fingerprint=hashlib.sha256("+".join(texts).encode()).hexdigest(),
            column_names=dict.fromkeys(name for rows, _, _ in parts for name in rows.column_names),
        )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows, i = self._find(index)
        return rows[i]

    def describe(self, index: int) -> str:
        rows, i = self._find(index)
        return rows.describe(i)

    def has_column(self, name: str) -> bool:
        return any(rows.has_column(name) for rows, _, _ in self._parts)

    def _find(self, index: int) -> tuple[RawRows, int]:
        part = bisect_right(self._ends, index)
        rows, _, stop = self._parts[part]
        return rows, index - self._ends[part] + stop


class _JsonRows(RawRows):
    """A file of JSON, mapped where it is plain lines, written out as lines where it is not."""

    nulls_are_padding = False

    def __init__(self, shard: Shard) -> None:
        self._uri = shard.file.uri
        with source_named(shard):
            self._lines, self._word = mappable_lines(shard.path)
        self._map: mmap.mmap | None = None
        starts, end = [], 0
        with self._lines.open("rb") as lines:
            for line in lines:
                if line.strip(BLANK):
                    starts.append(end)
                end += len(line)
        if end == 0:
            raise DataError(self._uri, "is empty", fix="write it again, or take it out of the dataset")
        self._starts = np.array(starts, np.int64)
        super().__init__(fingerprint=_fingerprint(shard.file.name, shard.path), column_names=self[0] if starts else ())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._data.seek(self._starts[index])
        try:
            row = json.loads(self._data.readline())
        except ValueError as error:
            fix = "write one JSON object a line, in UTF-8"
            raise DataError(self.describe(index), f"is no JSON ({error})", fix=fix) from error
        if not isinstance(row, dict):
            raise DataError(self.describe(index), f"is no JSON object: {row!r:.80}", fix="write one object a line")
        return row

    def describe(self, index: int) -> str:
        number = self._data[: self._starts[index]].count(b"\n") + 1
        return f"{self._uri}, {self._word} {number}"

    def has_column(self, name: str) -> bool:
        spellings = (json.dumps(name).encode(), json.dumps(name, ensure_ascii=False).encode())
        # Rows are only read where the file has that text at all.
        return any(self._data.find(spelling, 0) >= 0 for spelling in spellings) and any(
            name in self[i] for i in range(len(self))
        )

    @property
    def _data(self) -> mmap.mmap:
        if self._map is None:
            with self._lines.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map


class _ParquetRows(RawRows):
    """A file whose row groups are each read as a whole: cheap in order, dear at random."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        with source_named(shard), damage_named(shard.path), pq.ParquetFile(shard.path) as parquet:
            groups = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
            columns = parquet.schema_arrow.names
        super().__init__(fingerprint=_fingerprint(shard.file.name, shard.path), column_names=columns)
        self._ends: list[int] = [0, *accumulate(groups)]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = bisect_right(self._ends, index) - 1
        row = _row_group(self._shard, group).slice(index - self._ends[group], 1)
        return cast(dict[str, Any], row.to_pylist()[0])

    def describe(self, index: int) -> str:
        return f"{self._shard.file.uri}, row {index}"


class _DatasetRows(RawRows):
    """A ``datasets.Dataset``, but for images, which stay files: bytes and path."""

    def __init__(self, dataset: Any, *, name: str, fingerprint: str) -> None:
        import datasets

        self._dataset = dataset.with_format("arrow")
        self._features = datasets.Features(_undecoded(dataset.features))
        self._name = name
        super().__init__(fingerprint=f"{fingerprint} {name}", column_names=dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return cast(dict[str, Any], self._features.decode_example(self._dataset[index].to_pylist()[0]))

    def describe(self, index: int) -> str:
        return f"{self._name}, row {index}"


def _undecoded(feature: Any) -> Any:
    """``feature`` of ``datasets`` without the decoding of images."""
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, Mapping):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return type(feature)(_undecoded(feature.feature))
    return feature


def _hub_splits(path: str, split: str | None) -> dict[str, RawRows]:
    """What the hub gives for ``split``, under the name asked for; all splits for ``None``."""
    import datasets

    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) or path.endswith(tuple(chain(*SUFFIXES.values()))):
        fix = "write the whole path; ~ and $NAMES inside quotes are not replaced by the shell"
        inside = "" if path.startswith(("/", "~", "$")) else f" in {Path.cwd()}"
        raise DataError(path, f"no such path{inside}", fix=fix)
    try:
        found = datasets.load_dataset(path, split=split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        fix = "check the path, or the id and the split; offline, only datasets in the hub's cache can be had"
        raise DataError(path, f"is no local path, and the hub has nothing for it ({error})", fix=fix) from error
    return _named(path, {split: found} if split is not None else found)


def _saved_splits(place: str, files: Sequence[File], fetch: Fetch) -> dict[str, RawRows]:
    import datasets

    folder = fetch(place, files)
    try:
        saved = datasets.load_from_disk(str(folder))
    except (ValueError, OSError, KeyError, pa.ArrowInvalid) as error:
        raise DataError(place, f"is no whole save_to_disk folder ({error})", fix="save the dataset again") from error
    content = "+".join(_fingerprint(file.name, folder / file.name) for file in files)
    return _named(place, {"train": saved} if isinstance(saved, datasets.Dataset) else saved, content)


def _named(path: str, parts: Mapping[Any, Any], content: str = "") -> dict[str, RawRows]:
    """The ``datasets.Dataset`` of each split; ``datasets`` has fingerprints of its own, not all of the content."""
    return {
        str(name): _DatasetRows(part, name=f"{path} {name}", fingerprint=content or part._fingerprint)
        for name, part in parts.items()
    }


def _file_splits(place: str, files: Sequence[File], fetch: Fetch) -> dict[str, RawRows]:
    """All splits at ``place`` by name."""
    chosen = data_files(place, files=files, formats=(Format.JSONL, Format.PARQUET))
    by_split: dict[str, list[Shard]] = defaultdict(list)
    folder = fetch(place, [file for file, _ in chosen])
    for file, kind in chosen:
        by_split[split_of(file.name)].append(Shard(file, folder / file.name, kind))
    if len(by_split) == 1:
        by_split = {"train": next(iter(by_split.values()))}
    elif "" in by_split:
        names = f"{', '.join(sorted(filter(None, by_split)))}, but not {by_split[''][0].path.name}"
        raise DataError(place, f"some file names speak of splits: {names}", fix="name the files alike")
    opener = {Format.JSONL: _JsonRows, Format.PARQUET: _ParquetRows}[chosen[0][1]]
    opened = {name: [opener(shard) for shard in group] for name, group in by_split.items()}
    return {name: _Ranges([(rows, 0, len(rows)) for rows in group]) for name, group in opened.items()}


def _resolve(path: str, spec: str, splits: dict[str, RawRows]) -> RawRows:
    from datasets import ReadInstruction

    try:
        ranges = ReadInstruction.from_spec(spec).to_absolute({name: len(rows) for name, rows in splits.items()})
    except ValueError as error:
        fix = f"write a split such as {next(iter(splits))}[:100]; it has {', '.join(splits)}"
        raise DataError(path, f"split {spec!r}: {error}", fix=fix) from error
    return _Ranges([(splits[part.splitname], part.from_, max(part.from_, part.to)) for part in ranges])


@lru_cache(maxsize=1)
def _row_group(shard: Shard, group: int) -> pa.Table:
    options: Any = {"memory_map": True, "page_checksum_verification": True}
    with source_named(shard), damage_named(shard.path), pq.ParquetFile(shard.path, **options) as parquet:
        table = parquet.read_row_group(group)
        table.validate(full=True)
        return table


def _fingerprint(name: str, path: Path) -> str:
    """Of name and content, not of times: a file replaced within a second is another file."""
    return f"{name} {file_digest(path, 'sha256')}"
