"""A dataset of conversations becomes a store with a manifest, on all cores.

The rule: the bytes depend on the rows and the settings alone, not on the number of processes, and a store that has its
name is whole.
"""

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias, Unpack

import numpy as np
import pyarrow as pa

from burnish.data.chat import ChatReader, Conversation, Dropped, chat_reader
from burnish.data.encoder import fast_engine_installed
from burnish.data.example import Example, Images
from burnish.data.images import IMAGE_COLUMNS, IMAGE_TYPES, ImageRow, nested_column
from burnish.data.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, write_manifest
from burnish.data.pool import GUARD, map_in_processes, refuse_in_pool
from burnish.data.rows import RawRows, open_rows
from burnish.data.tokenize import TokenizerSettings
from burnish.errors import DataError
from burnish.log import get_logger
from burnish.storage.cache import Caching, cache_root, private_folder, publish_once
from burnish.storage.files import file_digest, is_remote, list_files
from burnish.storage.transfer import fetch, upload

log = get_logger(__name__)

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())), ("raw_row", pa.int64())])
"""``raw_row`` is the number of the row in the dataset that it was made from."""
RECIPE_VERSION = 4
"""Raised when the same rows and settings give other bytes than before."""
BATCH_ROWS = 256
"""Rows encoded together, and written as one record batch."""
IMAGE_BATCH_ROWS = 16
"""The same where rows may have images."""
SHARD_ROWS = (512, 16384)
"""Fewest and most raw rows that become one file."""
SAMPLED_ROWS = (8, 32)
"""Runs of raw rows, and rows in each, on which a faster engine must give the same ids."""
PROGRESS_SECONDS = 5.0


class RawSource(Caching):
    """What to tokenize, and how."""

    split: str | None
    """As for ``open_rows``."""
    tokenizer_settings: TokenizerSettings
    """Tokenizer, template, and what is a target."""
    messages_key: str | None
    """A column that must exist; ``None`` is ``messages``, which may be absent."""
    tools_key: str | None
    """The same for ``tools``."""
    system_key: str | None
    """The same for ``system``."""
    num_workers: int
    """Processes, at most the cores; 0 tokenizes in this one."""


def tokenized_store(path: str, **source: Unpack[RawSource]) -> Path:
    """The folder of the store of ``path``, tokenized now unless the cache has it.

    Args:
        path: a dataset, as for ``open_rows``.
        source: see ``RawSource``.

    Raises:
        DataError: rows cannot be read or tokenized, or none is left.
        StorageError: a bucket cannot be read, or the cache not be written.
    """
    job = TokenizeJob(path, source)
    # Ranks of a node may share the private one: it holds more than this store, and only one of them tokenizes.
    root = private_folder() if source["disable_cache"] else cache_root(source["cache_dir"])
    return publish_once(root / "tokenized" / job.key(), build=job.build, force=source["force_recache"])


def write_store(path: str, *, out: str, run: "Runner | None" = None, **source: Unpack[RawSource]) -> None:
    """Make ``out``, a new folder here or in a bucket, the store of ``path``.

    Args:
        path: a dataset, as for ``open_rows``.
        out: a local path, or a URI; there the manifest is written last.
        run: who tokenizes; by default the cores of this machine.
        source: see ``RawSource``.

    Raises:
        DataError: ``out`` holds something, rows cannot be read or tokenized, or none is left.
        StorageError: a bucket cannot be read or written.
    """
    if list_files(out, also=(MANIFEST_NAME,)) or (
        Path(out).exists() and (Path(out).is_file() or any(Path(out).iterdir()))
    ):
        raise DataError(f"out={out}", "is not empty", fix="name a new folder, or empty this one")
    job = TokenizeJob(path, source)
    if is_remote(out):
        folder = private_folder()
        job.build(folder, run=run)
        upload(folder, out, last=MANIFEST_NAME)
        shutil.rmtree(folder)
        return
    target = Path(out)
    if target.exists():
        target.rmdir()
    try:
        publish_once(target, build=partial(job.build, run=run))
    finally:
        # It guards a cache that many share; here it would be litter beside the user's folder.
        (target.parent / f".{target.name}.lock").unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Shard:
    """What became of a range of raw rows; without checksum when nothing was left of them."""

    rows: int
    tokens: int
    targets: int
    dropped: dict[str, int]
    drop_examples: dict[str, str]
    notices: tuple[str, ...]
    checksum: dict[str, str]
    """SHA-256 by the name of the file."""


Task: TypeAlias = tuple[int, int, Path]
"""Raw rows from the first up to, but not including, the second; and the file they become."""
Runner: TypeAlias = Callable[["TokenizeJob", Sequence[Task], bool], Iterator[Shard]]
"""Makes the files of all tasks, and says in their order what became of them; with the faster engine where that is so."""


class ShardWriter:
    """Tokenizes ranges of rows into Arrow files."""

    def __init__(self, rows: RawRows, reader: ChatReader, settings: TokenizerSettings) -> None:
        self._rows = rows
        self._reader = reader
        self._settings = settings
        self.tokenizer = settings.load()

    def try_fast_engine(self) -> bool:
        """Whether the tokenizer uses a faster engine from here on; rows that cannot be read are for ``write``."""
        runs, length = SAMPLED_ROWS
        if not fast_engine_installed() or len(self._rows) < 4 * runs * length:
            return False
        sample: list[Conversation] = []
        for start in range(0, len(self._rows) - length, len(self._rows) // runs):
            for number in range(start, start + length):
                with suppress(DataError):
                    read = self._reader.read(self._rows[number])
                    sample += [read] if isinstance(read, Conversation) else []
        return self.tokenizer.try_fast_engine(sample)

    def write(self, task: Task) -> Shard:
        """Make the file of ``task``.

        Raises:
            DataError: a row cannot be read or tokenized.
        """
        start, stop, file = task
        dropped: Counter[str] = Counter()
        examples: dict[str, str] = {}
        rows = tokens = targets = 0
        schema = _schema(self._settings)
        batch_rows = IMAGE_BATCH_ROWS if self.tokenizer.takes_images else BATCH_ROWS
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for first in range(start, stop, batch_rows):
                kept, raw_rows = [], []
                numbers = range(first, min(first + batch_rows, stop))
                for number, result in zip(numbers, self._encode(numbers), strict=True):
                    if isinstance(result, Dropped):
                        dropped[result.reason] += 1
                        if result.reason not in examples:
                            examples[result.reason] = f"{self._rows.describe(number)}: {result.detail}"
                    else:
                        kept.append(result)
                        raw_rows.append(number)
                if kept:
                    writer.write_batch(_record_batch(kept, raw_rows, schema=schema))
                rows += len(kept)
                tokens += sum(len(example.input_ids) for example in kept)
                targets += sum(int(example.loss_mask[1:].sum()) for example in kept)
        checksum = {file.name: file_digest(file, "sha256")} if rows else {}
        if not rows:
            file.unlink()
        return Shard(rows, tokens, targets, dict(dropped), examples, self.tokenizer.notices, checksum)

    def _encode(self, numbers: Sequence[int]) -> list[Example | Dropped]:
        try:
            read = [self._reader.read(self._rows[number]) for number in numbers]
            encoded = iter(self.tokenizer.encode([each for each in read if isinstance(each, Conversation)]))
            return [each if isinstance(each, Dropped) else next(encoded) for each in read]
        except Exception as error:
            # Whatever a template or a tokenizer raises, it belongs to a row; which, shows when each is tried by itself.
            if len(numbers) > 1:
                return [each for number in numbers for each in self._encode([number])]
            raise self._placed(numbers[0], error) from error

    def _placed(self, number: int, error: Exception) -> DataError:
        place = self._rows.describe(number)
        where = f"row {number} ({place})"
        if isinstance(error, DataError):
            inside = "" if error.where in ("", place) else f"{error.where}: "
            return DataError(where, inside + error.problem, fix=error.fix)
        problem = f"cannot be tokenized ({type(error).__name__}: {error})"
        return DataError(where, problem, fix="correct or remove the row")


class TokenizeJob:
    """A dataset that is about to be tokenized."""

    def __init__(self, path: str, source: RawSource) -> None:
        refuse_in_pool(path)
        self.path, self.source = path, source
        self._name = path if source["split"] is None else f"{path} {source['split']}"
        bring = partial(
            fetch,
            cache_dir=source["cache_dir"],
            force_recache=source["force_recache"],
            disable_cache=source["disable_cache"],
        )
        self._rows = open_rows(path, split=source["split"], fetch=bring)
        self._reader = chat_reader(
            self._rows,
            name=path,
            messages_key=source["messages_key"],
            tools_key=source["tools_key"],
            system_key=source["system_key"],
        )
        self._settings = replace(source["tokenizer_settings"], image_folder=_folder_of(path))
        self.writer = ShardWriter(self._rows, self._reader, self._settings)

    @property
    def fingerprint(self) -> str:
        """Of the rows alone."""
        return self._rows.fingerprint

    def key(self) -> str:
        """Changes with everything that decides the bytes of the store."""
        settings, tokenizer = self._settings, self.writer.tokenizer
        parts = {
            "versions": [FORMAT_VERSION, RECIPE_VERSION, version("transformers"), version("jinja2")],
            "rows": self._rows.fingerprint,
            "reader": asdict(self._reader),
            "tokenizer": tokenizer.tokenizer_hash,
            "template": tokenizer.template_hash,
            "images": tokenizer.image_description,
            "targets": [settings.train_on_what, settings.max_length, settings.truncation],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def build(self, folder: Path, *, run: Runner | None = None) -> None:
        """Write the store into ``folder``; ``run`` tokenizes, by default the cores of this machine.

        Raises:
            DataError: a row cannot be read or tokenized, or none is left.
        """
        num_rows = len(self._rows)
        shard_rows = min(max(SHARD_ROWS[0], -(-num_rows // 64)), SHARD_ROWS[1])
        bounds = pairwise([*range(0, num_rows, shard_rows), num_rows])
        tasks = [(start, stop, folder / f"rows-{i:05d}.arrow") for i, (start, stop) in enumerate(bounds)]
        fast = self.writer.try_fast_engine()
        shards, told, spoke = [], 0, time.monotonic()
        for shard in (run or TokenizeJob._run_here)(self, tasks, fast):
            shards.append(shard)
            if (passed := time.monotonic() - spoke) > PROGRESS_SECONDS:
                done = tasks[len(shards) - 1][1]
                speed = (done - told) / passed
                log.info("tokenizing %s: %d of %d rows, %.0f rows/s", self._name, done, num_rows, speed)
                told, spoke = done, time.monotonic()
        manifest = self._manifest(shards)
        self._check_left(manifest)
        for notice in manifest.notices:
            log.info("%s: %s", self._name, notice)
        write_manifest(folder, manifest)

    def _run_here(self, tasks: Sequence[Task], fast: bool) -> Iterator[Shard]:
        num_workers = min(self.source["num_workers"], os.cpu_count() or 1, len(tasks))
        if num_workers == 0 or len(tasks) == 1:
            yield from map(self.writer.write, tasks)
            return
        start = (self._rows, self._reader, self._settings, fast)
        try:
            yield from map_in_processes(_work, tasks, num_workers=num_workers, start=_start_worker, arguments=start)
        except BrokenProcessPool as error:
            fix = f"{GUARD}, free memory, or set num_workers=0"
            raise DataError(self._name, f"a process that tokenizes died ({error})", fix=fix) from error

    def _manifest(self, shards: Sequence[Shard]) -> Manifest:
        tokenizer = self.writer.tokenizer
        dropped: Counter[str] = sum((Counter(shard.dropped) for shard in shards), Counter())
        return Manifest(
            rows=sum(shard.rows for shard in shards),
            rows_read=len(self._rows),
            dropped=dict(dropped),
            drop_examples={reason: text for s in reversed(shards) for reason, text in s.drop_examples.items()},
            tokens=sum(shard.tokens for shard in shards),
            targets=sum(shard.targets for shard in shards),
            tokenizer_hash=tokenizer.tokenizer_hash,
            template_hash=tokenizer.template_hash,
            vocabulary_size=tokenizer.vocabulary_size,
            special_tokens=tokenizer.special_tokens,
            max_length=self._settings.max_length,
            train_on_what=str(self._settings.train_on_what),
            notices=tuple(sorted({*self._reader.notices, *(n for shard in shards for n in shard.notices)})),
            checksums={name: checksum for shard in shards for name, checksum in shard.checksum.items()},
        )

    def _check_left(self, manifest: Manifest) -> None:
        if manifest.rows_read == 0:
            raise DataError(self._name, "has no rows", fix="check the file and the split")
        if manifest.rows == 0:
            reasons = ", ".join(f"{count} {reason}" for reason, count in manifest.dropped.items())
            first = "; ".join(f"{reason}: {manifest.drop_examples[reason]}" for reason in manifest.dropped)
            problem = f"{manifest.rows_read} of {manifest.rows_read} rows dropped: {reasons}"
            raise DataError(self._name, problem, fix=f"mend the rows, or raise max_length if it cut them ({first})")


_writers: list[ShardWriter] = []
"""In a process of the pool, its one writer."""


def _start_worker(rows: RawRows, reader: ChatReader, settings: TokenizerSettings, fast: bool) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    _writers.append(ShardWriter(rows, reader, settings))
    if fast:
        _writers[0].tokenizer.use_fast_engine()


def _work(task: Task) -> Shard:
    return _writers[0].write(task)


def _folder_of(path: str) -> str | None:
    """The local folder that is or holds the dataset ``path``."""
    place = Path(path).expanduser()
    if is_remote(path) or not place.exists():
        return None
    return str((place if place.is_dir() else place.parent).absolute())


def _schema(settings: TokenizerSettings) -> pa.Schema:
    absent = "pixel_values" if settings.compressed_images else "images"
    names = [name for name in IMAGE_COLUMNS if name != absent] if settings.image_token_id is not None else []
    return pa.schema([*SCHEMA, *(pa.field(name, IMAGE_TYPES[name]) for name in names)])


def _record_batch(examples: Sequence[Example], raw_rows: Sequence[int], *, schema: pa.Schema) -> pa.RecordBatch:
    offsets = np.cumsum([0, *(len(example.input_ids) for example in examples)], dtype=np.int32)
    columns = (
        np.concatenate([example.input_ids for example in examples]),
        np.concatenate([example.loss_mask for example in examples]),
    )
    arrays = [pa.ListArray.from_arrays(offsets, pa.array(column)) for column in columns]
    arrays.append(pa.array(raw_rows, pa.int64()))
    if len(schema) > len(arrays):
        rows = [_image_row(number, one.images) for number, one in enumerate(examples) if one.images]
        arrays += [nested_column(rows, name=name, num_rows=len(examples)) for name in schema.names[len(arrays) :]]
    return pa.record_batch(arrays, schema=schema)


def _image_row(number: int, images: Images) -> ImageRow:
    grid, files = images.grid_thw.astype(np.int64), images.files
    if not files:
        return ImageRow(number, images.pixel_values, grid, np.zeros(len(grid), np.int64))
    return ImageRow(number, np.frombuffer(b"".join(files), np.uint8), grid, np.array([len(file) for file in files]))
