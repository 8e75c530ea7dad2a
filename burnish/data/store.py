"""Open a store: Parquet, JSON-lines, Arrow or a save_to_disk folder, with nothing of it in memory.

A row is a slice of a mapped file. The rule: everything that sampling, packing and planning need is known on opening.
"""

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from burnish.config.choices import Truncation
from burnish.data.example import Example, IntArray
from burnish.data.formats import Shard, find_shards, map_file
from burnish.data.index import FIELDS, Index, Rules, arrow_files, build_index, convert_shards, read_index
from burnish.data.manifest import read_manifest
from burnish.errors import DataError
from burnish.log import get_logger
from burnish.storage.cache import cache_root, private_folder, publish_once
from burnish.storage.files import describe_file

log = get_logger(__name__)

CACHE_VERSION = 1
"""Raise it when what is kept in the cache changes, or what a row has to be."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What became of the rows of a store."""

    name: str
    rows: int
    """Raw rows it was made from, where its manifest says so; else rows in it."""
    kept: int
    dropped: dict[str, int]
    """Rows that are not used, by reason; reasons without a row are left out."""
    tokens: int
    """Of the kept rows, after truncation."""
    targets: int


def open_store(
    path: Path,
    *,
    name: str,
    max_length: int | None = None,
    truncation: Truncation = Truncation.RIGHT,
    num_embeddings: int | None = None,
    cache_dir: Path | None = None,
    force_recache: bool = False,
    disable_cache: bool = False,
) -> "Store":
    """The rows at ``path``, all checked; the second opening of the same files reads only what the first worked out.

    Args:
        path: a file, a folder of shards, or a ``save_to_disk`` folder.
        name: what messages and metrics call it.
        max_length: tokens a row has at most; ``None`` for any number.
        truncation: what happens to a longer row.
        num_embeddings: rows of the model's embedding; ``None`` lets any id pass.
        cache_dir: where conversions and indices are kept; ``None`` is the user's cache.
        force_recache: work everything out anew.
        disable_cache: keep nothing beyond this process.

    Raises:
        DataError: there is no store, a file is damaged, a row is not what a store holds, or no row is left.
    """
    shards = find_shards(path)
    root = private_folder() if disable_cache else cache_root(cache_dir)
    identities = [[shard.file.name, shard.file.identity] for shard in shards]
    home = root / "stores" / _digest([CACHE_VERSION, str(path.absolute()), identities])
    converted = publish_once(home / "rows", build=partial(convert_shards, shards), force=force_recache)
    files = arrow_files(shards, converted)
    rules = Rules(max_length, truncation, num_embeddings)
    # Byte addresses are those of one generation of converted files.
    key = _digest([asdict(rules), [describe_file(file).identity for file in files]])
    build = partial(build_index, shards, files, rules=rules)
    folder = publish_once(home / f"index-{key}", build=build, force=force_recache)
    if any(describe_file(shard.file.path, name=shard.file.name) != shard.file for shard in shards):
        raise DataError(str(path), "was changed while it was read", fix="start again when it is written")
    index = read_index(folder)
    report = _make_report(name, path, index)
    return Store(report, shards=shards, files=files, index=index, folder=folder)


class Store:
    """An ``ExampleStore`` over mapped files; a row of it is a view of them."""

    def __init__(
        self, report: StoreReport, *, shards: Sequence[Shard], files: Sequence[Path], index: Index, folder: Path
    ) -> None:
        """Map the Arrow ``files`` that hold the rows of ``shards``, and the entries of their ``index`` in ``folder``."""
        self.name = report.name
        self.report = report
        self.fingerprint: str = index.digest[:32]
        """Of the kept rows' tokens, masks and sizes; the same at another path and in another format or width."""
        self._starts = index.starts
        self._shards = shards
        fields = {field: np.frombuffer(map_file(folder / field), dtype) for field, dtype in FIELDS.items()}
        self.lengths: IntArray = fields["length"]
        self.target_counts: IntArray = fields["targets"]
        self.num_patches: IntArray = np.broadcast_to(np.int32(0), len(self.lengths))
        self._row, self._ids_at, self._mask_at = fields["row"], fields["ids_at"], fields["mask_at"]
        self._mapped = [map_file(file) for file in files]
        self._widths = index.widths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        shard, length = self._shard_of(index), int(self.lengths[index])
        places = zip(self._widths[shard], (self._ids_at, self._mask_at), strict=True)
        ids, mask = (np.frombuffer(self._mapped[shard], kind, length, int(at[index])) for kind, at in places)
        return Example(ids, mask.astype(np.uint8, copy=False))

    def locate(self, index: int) -> str:
        """Where the row stands at its source: ``file, row n``."""
        return f"{self._shards[self._shard_of(index)].file.path}, row {self._row[index]}"

    def _shard_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        return bisect_right(self._starts, index) - 1


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _make_report(name: str, path: Path, index: Index) -> StoreReport:
    """With what the manifest says of raw rows that never became rows of the store."""
    rows, kept, dropped = index.rows, index.starts[-1], index.dropped
    manifest = read_manifest(path)
    if manifest is not None:
        if manifest.rows != rows:
            problem = f"holds {rows} rows, its manifest says {manifest.rows}"
            raise DataError(str(path), problem, fix="copy or write the store again")
        rows = manifest.rows_read
        dropped = dict(Counter(manifest.dropped) + Counter(dropped))
    if rows == 0:
        raise DataError(str(path), "holds no rows", fix="give a store with rows")
    dropped = {reason: count for reason, count in dropped.items() if count}
    counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    text = f"{sum(dropped.values())} of {rows} rows dropped: {counts}"
    if kept == 0:
        raise DataError(str(path), text, fix="raise max_length, or see that loss_mask has a 1 after position 0")
    if dropped:
        log.info("%s: %s", name, text)
    return StoreReport(name, rows, kept, dropped, index.tokens, index.targets)
