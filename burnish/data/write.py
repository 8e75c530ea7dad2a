"""A dataset of conversations becomes a store with a manifest, on all cores.

The rule: the bytes depend on the rows and the settings alone, not on the number of processes, and a store that has its
name is whole.
"""

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from burnish.data.chat import ChatReader, Conversation, Dropped, chat_reader
from burnish.data.example import Example
from burnish.data.manifest import FORMAT_VERSION, Manifest, write_manifest
from burnish.data.rows import RawRows, open_rows
from burnish.data.tokenize import ConversationTokenizer, TokenizerSettings
from burnish.errors import DataError
from burnish.log import get_logger
from burnish.storage.cache import private_folder, publish_once

log = get_logger(__name__)

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8()))])
RECIPE_VERSION = 1
"""Raised when the same rows and settings give other bytes than before."""
BATCH_ROWS = 256
"""Rows encoded together, and written as one record batch."""
SHARD_ROWS = (4096, 16384)
"""Fewest and most raw rows that become one file."""
PROGRESS_SECONDS = 5.0
WORKER_VARIABLE = "BURNISH_TOKENIZING"
"""Set in the environment of the processes that tokenize."""


def tokenized_store(
    path: str,
    *,
    split: str | None,
    tokenizer_settings: TokenizerSettings,
    messages_key: str | None,
    tools_key: str | None,
    system_key: str | None,
    num_workers: int,
    cache_dir: Path,
    force_recache: bool,
    disable_cache: bool,
) -> Path:
    """The folder of the store of ``path``, tokenized now unless the cache has it.

    Args:
        path: a local dataset or a hub id, as for ``open_rows``.
        split: as for ``open_rows``.
        tokenizer_settings: tokenizer, template, and what is a target.
        messages_key: a column that must exist; ``None`` is ``messages``, which may be absent.
        tools_key: the same for ``tools``.
        system_key: the same for ``system``.
        num_workers: processes, at most the cores; 0 tokenizes in this one.
        cache_dir: root of the cache.
        force_recache: tokenize anew, and replace what the cache has.
        disable_cache: use a folder of this process alone, removed when it exits.

    Raises:
        DataError: rows cannot be read or tokenized, or none is left.
    """
    job = _plan(path, split, tokenizer_settings, (messages_key, tools_key, system_key), num_workers)
    if disable_cache:
        folder = private_folder()
        job.build(folder)
        return folder
    return publish_once(cache_dir / "tokenized" / job.key(), build=job.build, force=force_recache)


def write_store(
    path: str,
    *,
    split: str | None,
    tokenizer_settings: TokenizerSettings,
    messages_key: str | None,
    tools_key: str | None,
    system_key: str | None,
    num_workers: int,
    out: Path,
) -> Path:
    """``out``, a new folder with the store of ``path``; the arguments are those of ``tokenized_store``.

    Raises:
        DataError: ``out`` holds something, rows cannot be read or tokenized, or none is left.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"out={out}", "is not empty", fix="name a new folder, or empty this one")
    job = _plan(path, split, tokenizer_settings, (messages_key, tools_key, system_key), num_workers)
    if out.exists():
        out.rmdir()
    return publish_once(out, build=job.build)


@dataclass(frozen=True, slots=True)
class _Shard:
    """What became of a range of raw rows; ``file`` is empty when nothing was left of them."""

    file: str
    sha256: str = ""
    rows: int = 0
    tokens: int = 0
    targets: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    drop_examples: dict[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Failure:
    """A DataError on its way between processes."""

    where: str
    problem: str
    fix: str


@dataclass(frozen=True, slots=True)
class _Source:
    """What a process needs to tokenize any part of a dataset."""

    rows: RawRows
    reader: ChatReader
    settings: TokenizerSettings


class _ShardWriter:
    """Tokenizes ranges of rows into Arrow files."""

    def __init__(self, source: _Source, *, tokenizer: ConversationTokenizer) -> None:
        self._rows = source.rows
        self._reader = source.reader
        self._tokenizer = tokenizer

    def write(self, start: int, *, stop: int, file: Path, progress: Callable[[int], None] = lambda _: None) -> _Shard:
        """Tokenize rows ``start`` to ``stop`` into ``file``."""
        dropped: dict[str, int] = {}
        examples: dict[str, str] = {}
        rows = tokens = targets = 0
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            for first in range(start, stop, BATCH_ROWS):
                numbers = range(first, min(first + BATCH_ROWS, stop))
                kept = []
                for number, result in zip(numbers, self._encode(numbers), strict=True):
                    if isinstance(result, Dropped):
                        dropped[result.reason] = dropped.get(result.reason, 0) + 1
                        if result.reason not in examples:
                            examples[result.reason] = f"{self._rows.describe(number)}: {result.detail}"
                    else:
                        kept.append(result)
                if kept:
                    writer.write_batch(_record_batch(kept))
                rows += len(kept)
                tokens += sum(len(example.input_ids) for example in kept)
                targets += sum(int(example.loss_mask[1:].sum()) for example in kept)
                progress(len(numbers))
        if not rows:
            file.unlink()
        sha256 = _sha256(file) if rows else ""
        name = file.name if rows else ""
        return _Shard(name, sha256, rows, tokens, targets, dropped, examples, self._tokenizer.notices)

    def _encode(self, numbers: Sequence[int]) -> list[Example | Dropped]:
        read = [self._read(number) for number in numbers]
        conversations = [(n, c) for n, c in zip(numbers, read, strict=True) if isinstance(c, Conversation)]
        encoded = iter(self._encode_batch(conversations))
        return [each if isinstance(each, Dropped) else next(encoded) for each in read]

    def _read(self, number: int) -> Conversation | Dropped:
        try:
            return self._reader.read(self._rows[number])
        except DataError as error:
            raise self._placed(number, error) from error

    def _encode_batch(self, conversations: Sequence[tuple[int, Conversation]]) -> list[Example | Dropped]:
        try:
            return self._tokenizer.encode([conversation for _, conversation in conversations])
        except Exception as error:
            # Which row it was is only known when each is tried by itself.
            if len(conversations) > 1:
                return [each for one in conversations for each in self._encode_batch([one])]
            raise self._placed(conversations[0][0], error) from error

    def _placed(self, number: int, error: Exception) -> DataError:
        where = f"row {number} ({self._rows.describe(number)})"
        if isinstance(error, DataError):
            inside = "" if error.where in ("", self._rows.describe(number)) else f"{error.where}: "
            return DataError(where, inside + error.problem, fix=error.fix)
        return DataError(
            where, f"cannot be tokenized ({type(error).__name__}: {error})", fix="correct or remove the row"
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """A dataset that is about to be tokenized."""

    name: str
    source: _Source
    tokenizer: ConversationTokenizer
    num_workers: int

    def key(self) -> str:
        """Changes with everything that decides the bytes of the store."""
        settings = self.source.settings
        parts = {
            "versions": [FORMAT_VERSION, RECIPE_VERSION, version("transformers"), version("jinja2")],
            "rows": self.source.rows.fingerprint,
            "reader": asdict(self.source.reader),
            "tokenizer": self.tokenizer.tokenizer_hash,
            "template": self.tokenizer.template_hash,
            "targets": [settings.train_on_what, settings.max_length, settings.truncation],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def build(self, folder: Path) -> None:
        """Write the store into ``folder``.

        Raises:
            DataError: a row cannot be read or tokenized, or none is left.
        """
        num_rows = len(self.source.rows)
        shard_rows = min(max(SHARD_ROWS[0], -(-num_rows // 64)), SHARD_ROWS[1])
        bounds = list(pairwise([*range(0, num_rows, shard_rows), num_rows]))
        tasks = [(start, stop, folder / f"rows-{i:05d}.arrow") for i, (start, stop) in enumerate(bounds)]
        num_workers = min(self.num_workers, os.cpu_count() or 1, len(tasks))
        progress = _Progress(self.name, num_rows)
        if num_workers == 0 or len(tasks) == 1:
            writer = _ShardWriter(self.source, tokenizer=self.tokenizer)
            shards = [writer.write(start, stop=stop, file=file, progress=progress.add) for start, stop, file in tasks]
        else:
            shards = self._in_pool(tasks, num_workers, progress)
        self._check_left(shards, num_rows)
        write_manifest(folder, self._manifest(shards, num_rows))

    def _in_pool(self, tasks: Sequence[tuple[int, int, Path]], num_workers: int, progress: "_Progress") -> list[_Shard]:
        context = multiprocessing.get_context("spawn")
        os.environ[WORKER_VARIABLE] = self.name
        pool = ProcessPoolExecutor(num_workers, context, _start_worker, (self.source,))
        try:
            futures = [pool.submit(_work, *task) for task in tasks]
            for future in _as_they_end(futures):
                if isinstance(outcome := future.result(), _Failure):
                    raise DataError(outcome.where, outcome.problem, fix=outcome.fix)
                progress.add(tasks[futures.index(future)][1] - tasks[futures.index(future)][0])
            return [shard for future in futures if isinstance(shard := future.result(), _Shard)]
        except BrokenProcessPool as error:
            fix = "guard your script with `if __name__ == '__main__':`, free memory, or set num_workers=0"
            raise DataError(self.name, f"a process that tokenizes died ({error})", fix=fix) from error
        finally:
            pool.shutdown(cancel_futures=True)
            del os.environ[WORKER_VARIABLE]

    def _check_left(self, shards: Sequence[_Shard], num_rows: int) -> None:
        if any(shard.rows for shard in shards):
            return
        if num_rows == 0:
            raise DataError(self.name, "has no rows", fix="check the file and the split")
        dropped, examples = _dropped(shards)
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        first = "; ".join(f"{reason}: {example}" for reason, example in examples.items())
        raise DataError(self.name, f"{num_rows} of {num_rows} rows dropped: {reasons}", fix=f"mend the rows ({first})")

    def _manifest(self, shards: Sequence[_Shard], num_rows: int) -> Manifest:
        dropped, examples = _dropped(shards)
        return Manifest(
            rows=sum(shard.rows for shard in shards),
            rows_read=num_rows,
            dropped=dropped,
            drop_examples=examples,
            tokens=sum(shard.tokens for shard in shards),
            targets=sum(shard.targets for shard in shards),
            tokenizer_hash=self.tokenizer.tokenizer_hash,
            template_hash=self.tokenizer.template_hash,
            vocabulary_size=self.tokenizer.vocabulary_size,
            special_tokens=self.tokenizer.special_tokens,
            max_length=self.source.settings.max_length,
            train_on_what=str(self.source.settings.train_on_what),
            notices=tuple(sorted({notice for shard in shards for notice in shard.notices})),
            checksums={shard.file: shard.sha256 for shard in shards if shard.file},
        )


class _Progress:
    """A line in the log every few seconds."""

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._done = 0
        self._spoke = time.monotonic()

    def add(self, rows: int) -> None:
        self._done += rows
        if time.monotonic() - self._spoke > PROGRESS_SECONDS:
            self._spoke = time.monotonic()
            log.info("tokenizing %s: %d of %d rows", self._name, self._done, self._total)


_writers: list[_ShardWriter] = []
"""In a process of the pool, its one writer."""


def _start_worker(source: _Source) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    _writers.append(_ShardWriter(source, tokenizer=source.settings.load()))


def _work(start: int, stop: int, file: Path) -> _Shard | _Failure:
    try:
        return _writers[0].write(start, stop=stop, file=file)
    except DataError as error:
        return _Failure(error.where, error.problem, error.fix)


def _plan(
    path: str,
    split: str | None,
    settings: TokenizerSettings,
    keys: tuple[str | None, str | None, str | None],
    num_workers: int,
) -> _Job:
    if WORKER_VARIABLE in os.environ:
        fix = "guard your script with `if __name__ == '__main__':`, or set num_workers=0"
        raise DataError(path, "a process that tokenizes has started the whole script again", fix=fix)
    rows = open_rows(path, split=split)
    reader = chat_reader(rows, name=path, messages_key=keys[0], tools_key=keys[1], system_key=keys[2])
    name = path if split is None else f"{path} {split}"
    return _Job(name, _Source(rows, reader, settings), settings.load(), num_workers)


def _as_they_end(futures: Sequence["Future[_Shard | _Failure]"]) -> Iterator["Future[_Shard | _Failure]"]:
    """Each as soon as it is done; of those done together, the earlier rows first."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        yield from sorted(done, key=futures.index)


def _dropped(shards: Sequence[_Shard]) -> tuple[dict[str, int], dict[str, str]]:
    """Totals by reason, and for each the first row."""
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for shard in shards:
        for reason, count in shard.dropped.items():
            counts[reason] = counts.get(reason, 0) + count
            examples.setdefault(reason, shard.drop_examples[reason])
    return counts, examples


def _record_batch(examples: Sequence[Example]) -> pa.RecordBatch:
    offsets = np.concatenate([[0], np.cumsum([len(example.input_ids) for example in examples])]).astype(np.int32)
    columns = (
        np.concatenate([example.input_ids for example in examples]),
        np.concatenate([example.loss_mask for example in examples]),
    )
    return pa.record_batch([pa.ListArray.from_arrays(offsets, pa.array(column)) for column in columns], schema=SCHEMA)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
