"""Raw rows of a dataset, wherever it lies: JSON lines, Parquet, ``save_to_disk``, the hub.

The rule: a row is what its file says. JSON is read as JSON, never through a table that would invent keys.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from burnish.data.lines import JsonLines
from burnish.errors import DataError

PARQUET, JSON = "Parquet", "JSON"
FORMATS = {".parquet": PARQUET} | {
    f".{name}{packed}": JSON for name in ("jsonl", "json") for packed in ("", ".gz", ".zst")
}
SIDECARS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Words in the names of files and folders that say which split a file belongs to, as on the hub."""


class RawRows(ABC):
    """Rows before tokenization, in the order of the dataset. Can be sent to another process."""

    def __init__(self, *, fingerprint: str, column_names: Sequence[str], nulls_are_padding: bool) -> None:
        self.fingerprint = fingerprint
        """Changes with the content."""
        self.column_names = tuple(column_names)
        """Of the first row, or of the schema."""
        self.nulls_are_padding = nulls_are_padding
        """Whether a null inside a nested value may only mean that some other row has that key."""

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


def open_rows(path: str, *, split: str | None) -> RawRows:
    """The raw rows of ``path``: a local file or folder, or else a dataset id of the hub.

    Args:
        path: JSON lines or a JSON array (also .gz, .zst), Parquet, a folder of one of these, a ``save_to_disk`` folder,
            or a hub id.
        split: as in ``datasets``, such as ``train[:100]``; ``None`` is the only split, or ``train``. Local files
            are ``train`` unless their names speak of several splits.

    Raises:
        DataError: nothing is there, it cannot be read, or it has no such split.
    """
    place = Path(path)
    if not place.exists():
        if not _may_be_hub_id(path):
            fix = "write the whole path; ~ and $NAMES inside quotes are not replaced by the shell"
            raise DataError(path, "no such path", fix=fix)
        splits = _hub_splits(path, split)
        if len(splits) == 1 and split is not None:
            return next(iter(splits.values()))
    else:
        splits = _local_splits(place)
    if split is None and len(splits) > 1 and "train" not in splits:
        raise DataError(path, f"has the splits {', '.join(splits)}", fix="name one of them")
    spec = split or ("train" if "train" in splits else next(iter(splits)))
    return _Ranges(_resolve(path, spec, splits))


class _Ranges(RawRows):
    """Ranges of other rows, one after the other."""

    def __init__(self, parts: Sequence[tuple[RawRows, int, int]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(stop - start for _, start, stop in parts))
        texts = [f"{rows.fingerprint}[{start}:{stop}]" for rows, start, stop in parts]
        super().__init__(
            fingerprint=hashlib.sha256("+".join(texts).encode()).hexdigest(),
            column_names=list(dict.fromkeys(name for rows, _, _ in parts for name in rows.column_names)),
            nulls_are_padding=any(rows.nulls_are_padding for rows, _, _ in parts),
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
    """Files of JSON lines, one after the other."""

    def __init__(self, files: Sequence[Path], *, root: Path) -> None:
        self._files = [JsonLines(file) for file in files]
        self._ends = list(accumulate(len(lines) for lines in self._files))
        columns = list(self[0]) if len(self) else []
        super().__init__(fingerprint=_fingerprint(files, root=root), column_names=columns, nulls_are_padding=False)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        lines, i = self._find(index)
        return lines[i]

    def describe(self, index: int) -> str:
        lines, i = self._find(index)
        return lines.describe(i)

    def has_column(self, name: str) -> bool:
        return name in self.column_names or any(lines.has_key(name) for lines in self._files)

    def _find(self, index: int) -> tuple[JsonLines, int]:
        lines = self._files[bisect_right(self._ends, index)]
        return lines, index - self._ends[bisect_right(self._ends, index)] + len(lines)


class _ParquetRows(RawRows):
    """Row groups, each read as a whole: cheap in order, dear at random."""

    def __init__(self, files: Sequence[Path], *, root: Path) -> None:
        self._groups: list[tuple[Path, int]] = []
        sizes: list[int] = []
        columns: dict[str, None] = {}
        for file in files:
            with _open_parquet(file) as parquet:
                columns |= dict.fromkeys(parquet.schema_arrow.names)
                for group in range(parquet.metadata.num_row_groups):
                    self._groups.append((file, group))
                    sizes.append(parquet.metadata.row_group(group).num_rows)
        self._ends = list(accumulate(sizes))
        self._loaded: tuple[int, pa.Table] | None = None
        super().__init__(fingerprint=_fingerprint(files, root=root), column_names=list(columns), nulls_are_padding=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = bisect_right(self._ends, index)
        if self._loaded is None or self._loaded[0] != number:
            file, group = self._groups[number]
            with _open_parquet(file) as parquet:
                self._loaded = (number, parquet.read_row_group(group))
        table = self._loaded[1]
        rows = table.slice(index - self._ends[number] + len(table), 1).to_pylist()
        return cast(dict[str, Any], rows[0])

    def describe(self, index: int) -> str:
        file = self._groups[bisect_right(self._ends, index)][0]
        first = next(number for number, (name, _) in enumerate(self._groups) if name == file)
        return f"{file}, row {index - (self._ends[first - 1] if first else 0)}"


class _DatasetRows(RawRows):
    """A ``datasets.Dataset``."""

    def __init__(self, dataset: Any, *, name: str, fingerprint: str) -> None:
        self._dataset = dataset
        self._name = name
        super().__init__(fingerprint=fingerprint, column_names=dataset.column_names, nulls_are_padding=True)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return cast(dict[str, Any], self._dataset[index])

    def describe(self, index: int) -> str:
        return f"{self._name}, row {index}"


def _may_be_hub_id(path: str) -> bool:
    """``name`` or ``owner/name``: no suffix of a data file, nothing that only a path has."""
    return bool(re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", path)) and not path.endswith(tuple(FORMATS))


def _hub_splits(path: str, split: str | None) -> dict[str, RawRows]:
    """What the hub gives for ``split``, under the name asked for; all splits for ``None``."""
    import datasets

    try:
        found = datasets.load_dataset(path, split=split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        fix = "check the path, or the id and the split; offline, only datasets in the hub's cache can be had"
        raise DataError(path, f"is no local path, and the hub has nothing for it ({error})", fix=fix) from error
    parts = {split: found} if split is not None else dict(found)
    return {
        str(name): _DatasetRows(part, name=f"{path} {name}", fingerprint=f"{part._fingerprint} {path} {name}")
        for name, part in parts.items()
    }


def _local_splits(place: Path) -> dict[str, RawRows]:
    """All splits at ``place`` by name."""
    if (place / "dataset_dict.json").is_file() or (place / "dataset_info.json").is_file():
        return _saved_splits(place)
    files = _data_files(place)
    kinds = Counter(kind for _, kind in files)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        raise DataError(str(place), f"mixes formats: {counts}", fix="keep one format in a folder")
    root = place if place.is_dir() else place.parent
    by_split: dict[str, list[Path]] = defaultdict(list)
    for file, _ in files:
        by_split[_split_word(file.relative_to(root)) if place.is_dir() else "train"].append(file)
    if len(by_split) == 1:
        by_split = {"train": next(iter(by_split.values()))}
    elif "" in by_split:
        names = f"{', '.join(sorted(filter(None, by_split)))}, but not {by_split[''][0].name}"
        raise DataError(str(place), f"some file names speak of splits: {names}", fix="name the files alike")
    opener = _JsonRows if JSON in kinds else _ParquetRows
    return {name: opener(group, root=root) for name, group in by_split.items()}


def _saved_splits(place: Path) -> dict[str, RawRows]:
    import datasets

    try:
        saved = datasets.load_from_disk(str(place))
    except (ValueError, OSError, KeyError, pa.ArrowInvalid) as error:
        fix = "save the dataset again"
        raise DataError(str(place), f"is not a whole save_to_disk folder ({error})", fix=fix) from error
    if isinstance(saved, datasets.Dataset):
        saved = {"train": saved}
    fingerprint = _fingerprint([file for file in sorted(place.rglob("*")) if file.is_file()], root=place)
    return {
        str(name): _DatasetRows(part, name=f"{place} {name}", fingerprint=f"{fingerprint} {name}")
        for name, part in saved.items()
    }


def _data_files(place: Path) -> list[tuple[Path, str]]:
    """Every data file with its format, in sorted order of the relative path."""
    if place.is_file():
        files = [place]
    else:
        files = sorted(file for file in place.rglob("*") if file.is_file() and _counts(file.relative_to(place)))
    found = [(file, kind) for file in files for suffix, kind in FORMATS.items() if file.name.lower().endswith(suffix)]
    if not found:
        names = ", ".join(file.name for file in files[:3]) or "no file"
        fix = f"give files that end in {' '.join(FORMATS)}, or a save_to_disk folder"
        raise DataError(str(place), f"no rows in a format that is known (found {names})", fix=fix)
    return found


def _counts(relative: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in relative.parts) and relative.name not in SIDECARS


def _split_word(relative: Path) -> str:
    words = re.split(r"[-._ /0-9]+", relative.as_posix().lower())
    return next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), "")


def _resolve(path: str, spec: str, splits: dict[str, RawRows]) -> list[tuple[RawRows, int, int]]:
    from datasets import ReadInstruction

    try:
        ranges = ReadInstruction.from_spec(spec).to_absolute({name: len(rows) for name, rows in splits.items()})
    except ValueError as error:
        fix = f"write a split such as {next(iter(splits))}[:100]; it has {', '.join(splits)}"
        raise DataError(path, f"split {spec!r}: {error}", fix=fix) from error
    return [(splits[part.splitname], part.from_, max(part.from_, part.to)) for part in ranges]


def _open_parquet(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(str(file), f"is not a whole Parquet file ({error})", fix="write it again") from error


def _fingerprint(files: Sequence[Path], *, root: Path) -> str:
    """Of names and contents, not of times: a file replaced within a second is another file."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()
