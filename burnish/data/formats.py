"""A path becomes its shards, and a shard its rows as Arrow batches in the file's own types. Nothing is cast here.

Its rule: what cannot be read whole is an error that names the file.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from burnish.data.jsonl import read_jsonl
from burnish.data.validate import COLUMNS
from burnish.errors import DataError
from burnish.log import get_logger
from burnish.storage.files import File, is_remote, read_bytes

log = get_logger(__name__)

TOKENS_A_BATCH = 1 << 20
"""About how many tokens are in memory at a time."""
_BYTES_LIKE_A_TOKEN = 16
"""Of compressed images."""


class Format(StrEnum):
    """How a shard is written."""

    PARQUET = "Parquet"
    JSONL = "JSON-lines"
    ARROW = "Arrow"


SUFFIXES = {
    Format.PARQUET: (".parquet", ".pq"),
    Format.JSONL: tuple(s + z for s in (".jsonl", ".json", ".ndjson") for z in ("", ".gz", ".zst")),
    Format.ARROW: (".arrow", ".feather", ".ipc"),
}
_SIDECARS = {
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json", "manifest.json"),
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "preprocessor_config.json", "stats.json"),
}
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in the names of files and folders that say which split a file belongs to, as on the hub."""
_ENDS_OF_STREAM = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""As written since Arrow 0.15, and before."""


Fetch: TypeAlias = Callable[[str, Sequence[File]], Path]
"""The local folder of files that were listed at a place."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a store."""

    file: File
    path: Path
    """Where its bytes are on this machine."""
    format: Format


def find_shards(store: str, *, files: Sequence[File], fetch: Fetch) -> list[Shard]:
    """The shards of ``store``, in the order of their rows, on this machine.

    Args:
        store: a file or a folder, local or in a bucket.
        files: what ``list_files`` found there.
        fetch: brings those that hold rows.

    Raises:
        DataError: there is no store, more than one format, or more than one data set.
    """
    names = {file.name: file for file in files}
    if "dataset_dict.json" in names:
        splits = json.loads(read_bytes(names["dataset_dict.json"]))["splits"]
        raise _many_data_sets(store, f"is a DatasetDict of the splits {', '.join(splits)}", splits[0])
    state = json.loads(read_bytes(names["state.json"])) if "state.json" in names else {}
    if "_data_files" in state:
        return _on_this_machine(store, _saved_to_disk(store, names, state), fetch)
    chosen = data_files(store, files=files, formats=tuple(Format))
    if [file.uri for file in files] != [store]:
        _warn_of_splits(store, [file for file, _ in chosen])
    return _on_this_machine(store, chosen, fetch)


def _on_this_machine(store: str, chosen: Sequence[tuple[File, Format]], fetch: Fetch) -> list[Shard]:
    folder = fetch(store, [file for file, _ in chosen])
    return [Shard(file, folder / file.name, kind) for file, kind in chosen]


def _saved_to_disk(store: str, names: Mapping[str, File], state: Mapping[str, Any]) -> list[tuple[File, Format]]:
    """Only what its state names: caches of a ``map`` may lie beside the rows."""
    wanted = [entry["filename"] for entry in state["_data_files"]]
    if missing := [name for name in wanted if name not in names]:
        fix = "copy the whole folder again"
        raise DataError(store, f"its state.json names {', '.join(missing)}, which is not there", fix=fix)
    return [(names[name], Format.ARROW) for name in wanted]


def _warn_of_splits(store: str, files: Sequence[File]) -> None:
    splits = Counter(split for file in files if (split := split_of(file.name)))
    if len(splits) > 1:
        text = ", ".join(f"{name} ({count} file{'s'[: count - 1]})" for name, count in splits.items())
        log.warning("%s: joins what look like splits: %s; give one split's files a folder of their own", store, text)


def data_files(store: str, *, files: Sequence[File], formats: Sequence[Format]) -> list[tuple[File, Format]]:
    """Those of ``files`` that are of one of ``formats``.

    Raises:
        DataError: there is none, they are of several formats, or there are data sets in folders of their own.
    """
    if not files and (is_remote(store) or not Path(store).exists()):
        raise DataError(store, "does not exist", fix="give the path of a file or a folder of shards")
    saved = [file.name.removesuffix("/state.json") for file in files if file.name.endswith("/state.json")]
    if saved:
        raise _many_data_sets(store, f"holds the save_to_disk data sets {', '.join(saved)}", saved[0])
    is_file = [file.uri for file in files] == [store]
    rows = files if is_file else [file for file in files if Path(file.name).name not in _SIDECARS]
    chosen = [(file, kind) for file in rows for kind in formats if file.name.lower().endswith(SUFFIXES[kind])]
    counts = Counter(kind for _, kind in chosen)
    if len(counts) > 1:
        text = " and ".join(f"{count} {kind} file{'s'[: count - 1]}" for kind, count in sorted(counts.items()))
        raise DataError(store, f"mixes formats: {text}", fix="keep one format a folder")
    if not chosen:
        others = Counter(Path(file.name).suffix or file.name for file in files)
        text = ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items())) or "no file at all"
        known = ", ".join(f"{kind} ({' '.join(SUFFIXES[kind])})" for kind in formats)
        problem = "is none of the formats that are read" if is_file else f"holds no rows ({text})"
        raise DataError(store, problem, fix=f"store rows as {known} or a save_to_disk folder")
    return chosen


def split_of(name: str) -> str:
    """The split that the path ``name`` speaks of, ``train``, ``validation`` or ``test``; empty for none."""
    words = re.split(r"[-._ /0-9]+", name.lower())
    return next((_SPLITS[word] for word in reversed(words) if word in _SPLITS), "")


def _many_data_sets(store: str, problem: str, first: str) -> DataError:
    return DataError(store, f"{problem}, not one data set", fix=f"give the folder of one, such as {store}/{first}")


def read_shard(shard: Shard) -> Iterator[pa.RecordBatch]:
    """The rows of ``shard``, in order, only those columns that decide something.

    Raises:
        DataError: the file is damaged or cut short.
    """
    if shard.format is Format.JSONL:
        return read_jsonl(shard.path)
    if shard.format is Format.PARQUET:
        return _read_parquet(shard.path)
    return read_arrow(map_file(shard.path), file=shard.path)


@contextmanager
def source_named(shard: Shard) -> Iterator[None]:
    """Errors that name the local copy of ``shard`` name the shard itself."""
    try:
        yield
    except DataError as error:
        raise DataError(error.where.replace(str(shard.path), shard.file.uri), error.problem, fix=error.fix) from error


@contextmanager
def damage_named(file: Path) -> Iterator[None]:
    """Turn what a reader raises into an error that names ``file``."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(str(file), f"is damaged or cut short ({error})", fix="write or copy it again") from error


def map_file(file: Path) -> pa.Buffer:
    """The bytes of ``file``, mapped; they stay readable when the file is unlinked. No descriptor is kept."""
    with damage_named(file), pa.memory_map(str(file)) as mapped:
        return mapped.read_buffer()


def read_arrow(mapped: pa.Buffer, *, file: Path) -> Iterator[pa.RecordBatch]:
    """The batches of an IPC file or stream, as views of ``mapped`` where it is not compressed."""
    if mapped.size == 0:
        raise DataError(str(file), "is empty (0 bytes)", fix="write or copy it again, or remove it")
    source = pa.BufferReader(mapped)
    with damage_named(file):
        if mapped.slice(0, 6).to_pybytes() == b"ARROW1":
            reader = pa.ipc.open_file(source)
            _check_footer(mapped, reader.num_record_batches)
            yield from (_relevant(reader.get_batch(i)) for i in range(reader.num_record_batches))
            return
        stream = pa.ipc.open_stream(source)
        end = source.tell()
        for batch in stream:
            end = source.tell()
            yield _relevant(batch)
    # A stream cut between two batches reads like a shorter one, two streams in a row like the first: only the end tells.
    if bytes(memoryview(mapped)[end : end + 9]) not in _ENDS_OF_STREAM:
        fix = "write or copy it again, one stream a file"
        raise DataError(str(file), "is cut short: no end-of-stream marker is where the file ends", fix=fix)


def _check_footer(mapped: pa.Buffer, num_batches: int) -> None:
    """A file that others were appended to, or whose footer is another's, reads like a shorter one."""
    source, found = pa.BufferReader(mapped), 0
    footer = mapped.size - 10 - int.from_bytes(bytes(mapped[mapped.size - 10 : mapped.size - 6]), "little")
    end = 8
    source.seek(end)
    while end < footer:
        try:
            found += pa.ipc.read_message(source).type == "record batch"
        except EOFError:  # the end of the stream that the file holds
            break
        end = source.tell()
    if found != num_batches or bytes(memoryview(mapped)[end:footer]) not in (b"", *_ENDS_OF_STREAM):
        raise pa.ArrowInvalid(f"its footer names {num_batches} record batches, and it holds others")


def _read_parquet(file: Path) -> Iterator[pa.RecordBatch]:
    if file.stat().st_size == 0:
        raise DataError(str(file), "is empty (0 bytes)", fix="write or copy it again, or remove it")
    options: Any = {"buffer_size": 1 << 20, "pre_buffer": False, "page_checksum_verification": True}
    with damage_named(file), pq.ParquetFile(file, **options) as reader:
        names = [name for name in reader.schema_arrow.names if name in COLUMNS]
        # What is at the end of the file, and the headers of its pages, have no checksums; but they say some things twice.
        if sum(reader.metadata.row_group(i).num_rows for i in range(reader.num_row_groups)) != reader.metadata.num_rows:
            raise pa.ArrowInvalid(f"its row groups are not its {reader.metadata.num_rows} rows")
        for group in range(reader.num_row_groups):
            meta = reader.metadata.row_group(group)
            columns = [meta.column(i) for i in range(meta.num_columns)]
            roots = [(column, column.path_in_schema.partition(".")[0]) for column in columns]
            tokens = [c.num_values for c, root in roots if root in ("input_ids", "pixel_values")]
            tokens += [c.total_uncompressed_size // _BYTES_LIKE_A_TOKEN for c, root in roots if root == "images"]
            size = max(1, meta.num_rows * TOKENS_A_BATCH // max(1, *tokens, meta.num_rows))
            read = 0
            for batch in map(_relevant, reader.iter_batches(size, row_groups=[group], columns=names)):
                read += len(batch)
                yield batch
            if names and read != meta.num_rows:
                raise pa.ArrowInvalid(f"row group {group} has {read} of its {meta.num_rows} rows")


def _relevant(batch: pa.RecordBatch) -> pa.RecordBatch:
    """What decides something, its offsets looked at: Arrow believes them, and those of a damaged file lead anywhere."""
    chosen = batch.select([i for i, name in enumerate(batch.schema.names) if name in COLUMNS])
    chosen.validate(full=True)
    return chosen
