"""Where every row of a store lies, how long it is and how many targets it has, worked out once and kept in files.

Two steps, each published as a folder. ``rows``: shards that cannot be sliced in place become Arrow files, one a shard,
row by row. ``index``: the kept rows' byte addresses, lengths and target counts, and a digest of what they hold.
The rule: both read a little at a time, whatever the size, and every row is checked before it is counted.
"""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import xxhash
from numpy.typing import NDArray

from burnish.config.choices import Truncation
from burnish.data.example import IntArray
from burnish.data.formats import TOKENS_A_BATCH, Format, Shard, map_file, read_arrow, read_shard, source_named
from burnish.data.images import (
    IMAGE_COLUMNS,
    RECORD,
    ImageRow,
    check_images,
    check_placeholders,
    is_bytes,
    nested_column,
)
from burnish.data.pool import GUARD, map_in_processes
from burnish.data.validate import Place, Rows, check_rows, is_list, list_offsets
from burnish.log import get_logger

log = get_logger(__name__)

NUM_WORKERS = 4
"""Shards converted at a time, at most: each takes some 100 MB."""
BYTES_WORTH_PROCESSES = 1 << 28
"""Of JSON; starting processes takes about as long as converting this much."""
ROWS_FILE = "files.json"
INDEX_FILE = "index.json"
FIELDS: Mapping[str, np.dtype[Any]] = {
    "row": np.dtype(np.int64),
    "ids_at": np.dtype(np.int64),
    "mask_at": np.dtype(np.int64),
    "length": np.dtype(np.int32),
    "targets": np.dtype(np.int32),
}
"""One file each, an entry a kept row: number in its shard, bytes into the shard's Arrow file, sizes after truncation."""
IMAGES_FILE, GRIDS_FILE = "images", "grids"
"""A ``RECORD`` a kept image row, and [images, 4] int64: the grid of each of their images, and its bytes as in ``ImageRow``."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides which rows are kept, and how much of them."""

    max_length: int | None
    truncation: Truncation
    num_embeddings: int | None
    image_token_id: int | None
    """Placeholder token of an image; ``None`` counts none."""
    image_merge_size: int | None
    """Patches along each side that one placeholder stands for."""


@dataclass(slots=True)
class Index:
    """What is known of a store beside the entries of its rows."""

    starts: list[int] = field(default_factory=lambda: [0])
    """[shards + 1] number of each shard's first kept row, and the number of kept rows"""
    widths: list[Sequence[str]] = field(default_factory=list)
    """[shards] the numpy types of ``input_ids`` and ``loss_mask``"""
    rows: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: {"too_long": 0, "image_too_long": 0, "no_target": 0})
    tokens: int = 0
    targets: int = 0
    images: int = 0
    compressed: bool = False
    """Whether any row has compressed images."""
    digest: str = ""


def convert_shards(shards: Sequence[Shard], folder: Path) -> None:
    """Write the shards that cannot be sliced in place as Arrow files into ``folder``; ``ROWS_FILE`` names them.

    Raises:
        DataError: of the rows that are not what a store holds, the first.
    """
    tasks = [(shard, folder / f"{number:06d}.arrow") for number, shard in enumerate(shards)]
    num_workers = min(NUM_WORKERS, os.cpu_count() or 1, len(tasks))
    text = sum(shard.file.size for shard in shards if shard.format is Format.JSONL)
    names = None
    if text > BYTES_WORTH_PROCESSES and num_workers > 1 and not multiprocessing.current_process().daemon:
        try:
            names = list(map_in_processes(_convert_if_needed, tasks, num_workers=num_workers))
        except BrokenProcessPool as error:
            log.warning("a process that converts shards died (%s), going on in this one; %s", error, GUARD)
    if names is None:
        # Everything but JSON is read outside of Python's lock.
        with ThreadPoolExecutor(1 if text else num_workers) as pool:
            names = list(pool.map(_convert_if_needed, tasks))
    (folder / ROWS_FILE).write_text(json.dumps(names))


def _convert_if_needed(task: tuple[Shard, Path]) -> str | None:
    """The name of the Arrow file that was written; ``None`` where the shard itself is one to slice."""
    shard, target = task
    with source_named(shard):
        if _is_plain(shard):
            return None
        _convert(shard, target)
    return target.name


def arrow_files(shards: Sequence[Shard], folder: Path) -> list[Path]:
    """For each shard the Arrow file that holds its rows: its own, or the one in ``folder``."""
    names = json.loads((folder / ROWS_FILE).read_text())
    return [folder / name if name else shard.path for shard, name in zip(shards, names, strict=True)]


def _is_plain(shard: Shard) -> bool:
    """Whether all numbers and images lie in the mapped file as they are: not compressed, not boolean, not coded."""
    if shard.format is not Format.ARROW:
        return False
    mapped = map_file(shard.path)
    for batch in read_arrow(mapped, file=shard.path):
        listed = {field.name for field in batch.schema if is_list(field.type)}
        if not listed >= {"input_ids", "loss_mask"}:
            return True  # nothing to convert: the check will name it
        for name in listed & {"input_ids", "loss_mask", "pixel_values", "images"}:
            values = batch.column(name)
            while is_list(values.type):
                values = values.values
            buffer = values.buffers()[-1]
            lies_here = not buffer or 0 <= buffer.address - mapped.address <= mapped.size - buffer.size
            is_kind = (
                is_bytes(values.type) if name == "images" else name == "pixel_values" or pt.is_integer(values.type)
            )
            if not is_kind or not lies_here:
                return False
    return True


def _convert(shard: Shard, target: Path) -> None:
    with ExitStack() as stack:
        writer = None
        for part, place in _slices(read_shard(shard), shard.path):
            rows, images = check_rows(part, place=place, num_embeddings=None), check_images(part, place=place)
            columns = {"input_ids": rows.input_ids, "loss_mask": _as_bytes(rows.loss_mask)}
            lists = {name: pa.LargeListArray.from_arrays(rows.offsets, values) for name, values in columns.items()}
            if set(IMAGE_COLUMNS) & set(part.schema.names):
                lists |= {name: nested_column(images, name=name, num_rows=len(part)) for name in IMAGE_COLUMNS}
            batch = pa.RecordBatch.from_pydict(lists)
            writer = writer or stack.enter_context(pa.ipc.new_file(str(target), batch.schema))
            writer.write_batch(batch)
        if writer is None:
            stack.enter_context(pa.ipc.new_file(str(target), pa.schema([])))


def _slices(batches: Iterator[pa.RecordBatch], file: Path) -> Iterator[tuple[pa.RecordBatch, Place]]:
    """Stretches of about ``TOKENS_A_BATCH`` tokens, one row at least, and where they stand: their arrays stay small."""
    first_row = 0
    for batch in batches:
        for start, stop in _cuts(batch):
            yield batch.slice(start, stop - start), Place(file, first_row + start)
        first_row += len(batch)


def _cuts(batch: pa.RecordBatch) -> Iterator[tuple[int, int]]:
    # Rows count as well as tokens, or a million empty ones would be one stretch.
    ends = np.arange(1, len(batch) + 1)
    if batch.schema.names.count("input_ids") == 1 and is_list(batch.column("input_ids").type):
        if len(batch) + len(batch.column("input_ids").values) <= TOKENS_A_BATCH:
            yield 0, len(batch)
            return
        ends += list_offsets(batch.column("input_ids"))[1:]
    start = 0
    while start < len(batch):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + TOKENS_A_BATCH, side="right")))
        yield start, stop
        start = stop


def build_index(shards: Sequence[Shard], files: Sequence[Path], folder: Path, *, rules: Rules) -> None:
    """Check all rows of ``shards``, which ``files`` hold as Arrow, and write the entries of the kept ones.

    Raises:
        DataError: a row is not what a store holds; or is too long where that is to be an error.
    """
    index, digest = Index(), _Digest()
    with ExitStack() as stack:
        names = (*FIELDS, IMAGES_FILE, GRIDS_FILE)
        outputs = {name: stack.enter_context((folder / name).open("wb", 1 << 18)) for name in names}
        for shard, file in zip(shards, files, strict=True):
            with source_named(shard):
                _index_shard(shard, file, outputs, index=index, digest=digest, rules=rules)
    index.digest = digest.hexdigest()
    (folder / INDEX_FILE).write_text(json.dumps(asdict(index)))


def read_index(folder: Path) -> Index:
    """What ``build_index`` wrote beside the entries."""
    return Index(**json.loads((folder / INDEX_FILE).read_text()))


def _index_shard(
    shard: Shard, file: Path, outputs: Mapping[str, IO[bytes]], *, index: Index, digest: "_Digest", rules: Rules
) -> None:
    mapped = map_file(file)
    kept, widths = index.starts[-1], ("<i4", "|u1")
    for part, place in _slices(read_arrow(mapped, file=file), shard.path):
        rows = check_rows(part, place=place, num_embeddings=rules.num_embeddings)
        images = check_images(part, place=place)
        if rules.image_token_id is not None and rules.image_merge_size:
            found = _count(rows.input_ids == rules.image_token_id, rows.offsets)
            check_placeholders(found, images, merge_size=rules.image_merge_size, place=place)
        entries, dropped = _entries(rows, images, mapped.address, place=place, rules=rules)
        keep = None
        if dropped:
            for reason, chosen in dropped.items():
                index.dropped[reason] += int(np.count_nonzero(chosen))
            keep = ~np.logical_or.reduce(list(dropped.values()))
            entries = {name: values[keep] for name, values in entries.items()}
        for name, dtype in FIELDS.items():
            outputs[name].write(entries[name].astype(dtype, copy=False).data)
        digest.update(rows, keep, sizes=[entries[name] for name in ("stored", "length", "targets")])
        for image in images:
            if keep is None or keep[image.row]:
                number = kept + (image.row if keep is None else int(np.count_nonzero(keep[: image.row])))
                record = (number, image.data.ctypes.data - mapped.address, image.data.dtype.str, index.images)
                sizes = (len(image.grid), image.patches, image.features)
                outputs[IMAGES_FILE].write(np.array((*record, *sizes), RECORD).tobytes())
                outputs[GRIDS_FILE].write(np.column_stack([image.grid, image.sizes]).tobytes())
                digest.update_images(number, image)
                index.images += len(image.grid)
                index.compressed |= image.features == 0
        index.rows += len(rows.offsets) - 1
        index.tokens += int(entries["length"].sum())
        index.targets += int(entries["targets"].sum())
        kept += len(entries["length"])
        widths = (rows.input_ids.dtype.str, "|u1" if rows.loss_mask.itemsize == 1 else rows.loss_mask.dtype.str)
    index.starts.append(kept)
    index.widths.append(widths)


def _entries(
    rows: Rows, images: Sequence[ImageRow], base: int, *, place: Place, rules: Rules
) -> tuple[dict[str, NDArray[np.int64]], dict[str, NDArray[np.bool_]]]:
    """The entries of all ``rows``, whose arrays lie in the file mapped at ``base``, and which to drop for what."""
    starts, stored = rows.offsets[:-1], rows.offsets[1:] - rows.offsets[:-1]
    lengths, dropped = stored, {}
    if rules.max_length and (too_long := stored > rules.max_length).any():
        has_image = np.isin(np.arange(len(stored)), [image.row for image in images])
        dropped["image_too_long"] = too_long & has_image
        too_long &= ~has_image
        if rules.truncation is Truncation.RIGHT:
            lengths = np.where(too_long, rules.max_length, stored)
        elif rules.truncation is Truncation.DROP:
            dropped["too_long"] = too_long
        elif too_long.any():
            row = int(too_long.argmax())
            problem = f"has {lengths[row]} tokens, more than max_length={rules.max_length}"
            place.reject(row, problem, fix="raise max_length, or set truncation to right or drop")
    targets = _count_targets(rows.loss_mask, starts, lengths)
    if (no_target := targets == 0).any():
        dropped["no_target"] = no_target & ~np.logical_or.reduce(list(dropped.values()))
    entries = {
        "row": np.arange(place.first_row, place.first_row + len(lengths)),
        "ids_at": rows.input_ids.ctypes.data - base + starts * rows.input_ids.itemsize,
        "mask_at": rows.loss_mask.ctypes.data - base + starts * rows.loss_mask.itemsize,
        "stored": stored,
        "length": lengths,
        "targets": targets,
    }
    return entries, dropped


def _count(chosen: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """[rows] how many of each row's tokens are ``chosen``."""
    rows = np.searchsorted(offsets, np.flatnonzero(chosen), side="right") - 1
    return np.bincount(rows, minlength=len(offsets) - 1)


def _count_targets(mask: IntArray, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """[rows] the ones after position 0: nothing stands before it to predict it from."""
    targets = np.zeros(len(starts), np.int64)
    some = slice(None) if lengths.min(initial=2) > 1 else lengths > 1
    edges = np.stack([starts[some] + 1, starts[some] + lengths[some]], axis=1).ravel()
    if len(edges):
        # Sums from each edge to the next; every other one lies between two rows.
        last = len(edges) - (edges[-1] == len(mask))
        narrow = np.uint16 if lengths.max() < 2**16 else np.int64  # the narrower, the faster
        targets[some] = np.add.reduceat(_as_bytes(mask), edges[:last], dtype=narrow)[::2]
    return targets


def _as_bytes(mask: IntArray) -> NDArray[np.uint8]:
    return mask.view(np.uint8) if mask.itemsize == 1 else mask.astype(np.uint8)


class _Digest:
    """Of the rows' tokens, masks and sizes; the same in any integer width and however they are cut into batches."""

    def __init__(self) -> None:
        self._ids, self._large_ids, self._mask, self._images, *self._sizes = (xxhash.xxh3_128() for _ in range(7))
        self._tokens = 0

    def update(self, rows: Rows, keep: NDArray[np.bool_] | None, *, sizes: Sequence[NDArray[np.int64]]) -> None:
        """Add the rows to ``keep``, ``None`` for all, and three ``sizes`` of each, [kept rows]."""
        for part, values in zip(self._sizes, sizes, strict=True):
            part.update(values.data)
        spans = [[0, len(rows.offsets) - 1]]
        if keep is not None:
            spans = np.flatnonzero(np.diff(keep, prepend=False, append=False)).reshape(-1, 2).tolist()
        mask = _as_bytes(rows.loss_mask)
        for start, stop in spans:
            tokens = slice(rows.offsets[start], rows.offsets[stop])
            ids = rows.input_ids[tokens]
            self._ids.update((ids.view(np.uint32) if ids.itemsize == 4 else ids.astype(np.uint32)).data)
            if ids.itemsize > 4 and len(large := np.flatnonzero(ids >> 32)):
                self._large_ids.update(np.stack([self._tokens + large, ids[large]], axis=1, dtype=np.int64).data)
            self._mask.update(mask[tokens].data)
            self._tokens += len(ids)

    def update_images(self, number: int, image: ImageRow) -> None:
        """Add the images of the kept row ``number``; the same in any float width that holds their values."""
        self._images.update(np.array([number, image.features, *image.sizes, *image.grid.ravel()]).data)
        self._images.update(image.data.astype(np.float32).data if image.features else image.data.data)

    def hexdigest(self) -> str:
        parts = (self._ids, self._large_ids, self._mask, self._images, *self._sizes)
        return hashlib.sha256("".join(part.hexdigest() for part in parts).encode()).hexdigest()
