"""Open a store: Parquet, JSON-lines, Arrow or a save_to_disk folder, with nothing of it in memory.

A row is a slice of a mapped file. The rule: everything that sampling, packing and planning need is known on opening.
"""

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from burnish.config.choices import Truncation
from burnish.data.example import Example, Images, IntArray
from burnish.data.formats import Shard, find_shards, map_file
from burnish.data.images import RECORD
from burnish.data.index import (
    FIELDS,
    GRIDS_FILE,
    IMAGES_FILE,
    Index,
    Rules,
    arrow_files,
    build_index,
    convert_shards,
    read_index,
)
from burnish.data.manifest import MANIFEST_NAME, Manifest, read_manifest
from burnish.data.pictures import ImageReader
from burnish.data.pool import refuse_in_pool
from burnish.errors import DataError
from burnish.log import get_logger
from burnish.storage.cache import Caching, cache_root, private_folder, publish_once
from burnish.storage.files import canonical, describe_file, file_digest, is_remote, list_files
from burnish.storage.transfer import fetch

log = get_logger(__name__)

CACHE_VERSION = 5
"""Raise it when what is kept in the cache changes, or what a row has to be."""
_HASHED = 32
"""Ids at each end of a row that its hash is made of."""
_ROWS_AT_ONCE = 1 << 15


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
    path: str | Path,
    *,
    name: str,
    max_length: int | None = None,
    truncation: Truncation = Truncation.RIGHT,
    num_embeddings: int | None = None,
    image_token_id: int | None = None,
    image_merge_size: int | None = None,
    admit: Callable[[str, Manifest], None] | None = None,
    image_reader: Callable[[], ImageReader] | None = None,
    cache_dir: str | Path | None = None,
    force_recache: bool = False,
    disable_cache: bool = False,
) -> "Store":
    """The rows at ``path``, all checked; the second opening of the same files reads only what the first worked out.

    Args:
        path: a file, a folder of shards, or a ``save_to_disk`` folder; local, or the URI of one in a bucket.
        name: what messages and metrics call it.
        max_length: tokens a row has at most; ``None`` for any number.
        truncation: what happens to a longer row.
        num_embeddings: rows of the model's embedding; ``None`` lets any id pass.
        image_token_id: placeholder of images; ``None`` counts none.
        image_merge_size: patches along each side that one placeholder stands for.
        admit: called with place and manifest of each store that has one, before any row is fetched.
        image_reader: called where rows have compressed images; ``None`` for a store of which no such row is read.
        cache_dir: where downloads, conversions and indices are kept; ``None`` is the user's cache.
        force_recache: fetch and work everything out anew.
        disable_cache: keep nothing beyond this process.

    Raises:
        DataError: there is no store, a file is damaged, a row is not what a store holds, or no row is left.
    """
    place = canonical(path)
    refuse_in_pool(place)
    caching = Caching(cache_dir=cache_dir, force_recache=force_recache, disable_cache=disable_cache)
    shards, manifests = _bring_shards(place, admit=admit, caching=caching)
    home = _home(place, shards, root=private_folder() if disable_cache else cache_root(cache_dir))
    convert = partial(_convert, shards, checksums=_checksums(manifests))
    arrows = arrow_files(shards, publish_once(home / "rows", build=convert, force=force_recache))
    rules = Rules(max_length, truncation, num_embeddings, image_token_id, image_merge_size)
    index_folder = _bring_index(home, shards, arrows, rules=rules, force=force_recache)
    _require_unchanged(place, shards)
    index, manifest = read_index(index_folder), manifests.get("")
    report = _make_report(name, place, index, manifest)
    store = Store(report, shards=shards, files=arrows, index=index, folder=index_folder, manifest=manifest)
    if image_reader and index.compressed:
        store.read_images_by(image_reader())
    return store


def _bring_index(home: Path, shards: Sequence[Shard], arrows: Sequence[Path], *, rules: Rules, force: bool) -> Path:
    # Byte addresses are those of one generation of converted files.
    key = _digest([asdict(rules), [describe_file(file).identity for file in arrows]])
    return publish_once(home / f"index-{key}", build=partial(build_index, shards, arrows, rules=rules), force=force)


def _require_unchanged(place: str, shards: Sequence[Shard]) -> None:
    if any(describe_file(s.path, name=s.file.name) != s.file for s in shards if not s.file.source):
        raise DataError(place, "was changed while it was read", fix="start again when it is written")


def _refuse_within(place: str, root: Path) -> None:
    """A cache inside the store would be read as rows of it the next time."""
    try:
        inside = root.resolve().relative_to(Path(place).resolve())
    except ValueError:
        return
    if not is_remote(place) and not any(part.startswith((".", "_")) for part in inside.parts):
        raise DataError(place, f"holds the cache {root}", fix="set cache_dir to a folder outside of the store")


def _bring_shards(
    place: str, *, admit: Callable[[str, Manifest], None] | None, caching: Caching
) -> tuple[list[Shard], dict[str, Manifest]]:
    """The shards at ``place`` on this machine, and the manifest of each folder there that has one, by its name."""
    manifests, rows = {}, []
    for file in list_files(place, also=(MANIFEST_NAME,)):
        if file.name.rpartition("/")[2] == MANIFEST_NAME:
            manifests[file.name.removesuffix(MANIFEST_NAME)] = read_manifest(file)
        else:
            rows.append(file)
    for folder, manifest in manifests.items():
        if admit:
            admit(f"{place}/{folder}".rstrip("/"), manifest)
    shards = find_shards(place, files=rows, fetch=partial(fetch, checksums=_checksums(manifests), **caching))
    return shards, manifests


def _home(place: str, shards: Sequence[Shard], *, root: Path) -> Path:
    """Where all that is worked out of these versions of these files is kept."""
    _refuse_within(place, root)
    identities = [[shard.file.name, shard.file.identity] for shard in shards]
    where = place if is_remote(place) else str(Path(place).absolute())
    return root / "stores" / _digest([CACHE_VERSION, where, identities])


def _checksums(manifests: Mapping[str, Manifest]) -> dict[str, str]:
    """SHA-256 of the shards that manifests name, by their names in the store."""
    return {folder + name: sha for folder, of in manifests.items() for name, sha in of.checksums.items()}


def _convert(shards: Sequence[Shard], folder: Path, *, checksums: Mapping[str, str]) -> None:
    for shard in shards:
        expected = checksums.get(shard.file.name)
        if expected and not shard.file.source and file_digest(shard.path, "sha256") != expected:
            fix = "copy or write the store again"
            raise DataError(shard.file.uri, "differs from the checksum in its manifest", fix=fix)
    convert_shards(shards, folder)


class Store:
    """An ``ExampleStore`` over mapped files; a row of it is a view of them."""

    def __init__(
        self,
        report: StoreReport,
        *,
        shards: Sequence[Shard],
        files: Sequence[Path],
        index: Index,
        folder: Path,
        manifest: Manifest | None,
    ) -> None:
        """Map the Arrow ``files`` that hold the rows of ``shards``, and the entries of their ``index`` in ``folder``."""
        self._image_reader: ImageReader | None = None
        self.name = report.name
        self.report = report
        self.manifest = manifest
        """What the store says of itself."""
        self.fingerprint: str = index.digest[:32]
        """Of the kept rows' tokens, masks and sizes; the same at another path and in another format or width."""
        self._starts = index.starts
        self._shards = shards
        fields = {field: np.frombuffer(map_file(folder / field), dtype) for field, dtype in FIELDS.items()}
        self.lengths: IntArray = fields["length"]
        self.target_counts: IntArray = fields["targets"]
        self.num_patches: IntArray = np.broadcast_to(np.int32(0), len(self.lengths))
        if index.images:
            self._images = np.frombuffer(map_file(folder / IMAGES_FILE), RECORD)
            self._grids = np.frombuffer(map_file(folder / GRIDS_FILE), np.int64).reshape(-1, 4)
            self.num_patches = np.zeros(len(self.lengths), np.int32)
            self.num_patches[self._images["row"]] = self._images["patches"]
        self._row, self._ids_at, self._mask_at = fields["row"], fields["ids_at"], fields["mask_at"]
        self._mapped = [map_file(file) for file in files]
        self._kinds = [[np.dtype(kind) for kind in kinds] for kinds in index.widths]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        shard, length = self._shard_of(index), int(self.lengths[index])
        mapped, (ids_kind, mask_kind) = self._mapped[shard], self._kinds[shard]
        ids = np.frombuffer(mapped, ids_kind, length, int(self._ids_at[index]))
        mask = np.frombuffer(mapped, mask_kind, length, int(self._mask_at[index]))
        images = self._images_of(index, mapped) if self.num_patches[index] else None
        return Example(ids, mask.astype(np.uint8, copy=False), images)

    def row_hashes(self) -> NDArray[np.uint64]:
        """[rows] equal where rows have equal length, targets and image sizes, and equal ids at both ends.

        Of a row longer than both ends together, ids between them are not looked at: a million rows take a second or two.
        """
        hashes = np.empty(len(self), np.uint64)
        factors = np.random.default_rng(0).integers(1, 2**63, 2 * _HASHED + 3, np.uint64) * 2 + 1
        for first in range(0, len(self), _ROWS_AT_ONCE):
            part = slice(first, min(first + _ROWS_AT_ONCE, len(self)))
            sizes = np.stack([self.lengths[part], self.target_counts[part], self.num_patches[part]], axis=1)
            hashes[part] = (sizes.astype(np.uint64) * factors[-3:]).sum(1) + self._ends(part) @ factors[:-3]
        hashes ^= hashes >> np.uint64(29)
        hashes *= factors[0]
        return hashes

    def _ends(self, part: slice) -> NDArray[np.uint64]:
        """[rows, 2 * _HASHED] the first and the last ids of rows; of short ones, some stand there several times."""
        lengths = self.lengths[part, None].astype(np.int64)
        near = np.arange(_HASHED)
        places = np.concatenate([np.minimum(near, lengths - 1), np.maximum(lengths - 1 - near, 0)], axis=1)
        ids = np.empty(places.shape, np.uint64)
        shards = np.searchsorted(self._starts, np.arange(part.start, part.stop), side="right") - 1
        for shard in np.unique(shards):
            kind, own = self._kinds[shard][0], shards == shard
            at = self._ids_at[part][own]
            # Numbers of a file begin at multiples of their width, but for where the file's first one begins.
            begin = int(at[0]) % kind.itemsize
            count = (self._mapped[shard].size - begin) // kind.itemsize
            numbers = np.frombuffer(self._mapped[shard], kind, count, begin)
            ids[own] = numbers[(at[:, None] - begin) // kind.itemsize + places[own]]
        return ids

    def read_images_by(self, reader: ImageReader) -> None:
        """Make pixels of compressed images by ``reader``.

        Raises:
            DataError: the row with most patches gets others than it should, as it does where sizes are other ones.
        """
        self._image_reader = reader
        _ = self[int(self.num_patches.argmax())]

    def _images_of(self, index: int, mapped: pa.Buffer) -> Images:
        record = self._images[np.searchsorted(self._images["row"], index)]
        patches, features, first = int(record["patches"]), int(record["features"]), int(record["first_image"])
        of_images = self._grids[first : first + int(record["images"])]
        kind, start = np.dtype(record["kind"].decode()), int(record["data_at"])
        if features:
            pixels = np.frombuffer(mapped, kind, patches * features, start)
            return Images(pixels.reshape(patches, features), of_images[:, :3])
        ends = start + np.cumsum([0, *of_images[:, 3]])
        return self._read([mapped[a:b].to_pybytes() for a, b in pairwise(ends.tolist())], of_images[:, :3], index)

    def _read(self, files: Sequence[bytes], grid: IntArray, index: int) -> Images:
        assert self._image_reader, "opened without image_reader"
        try:
            images = self._image_reader.read(files)
        except DataError as error:
            raise DataError(f"{self.locate(index)}, {error.where}", error.problem, fix=error.fix) from error
        if not np.array_equal(images.grid_thw, grid):
            problem = f"its images become the grid {images.grid_thw.tolist()}, not image_grid_thw {grid.tolist()}"
            raise DataError(self.locate(index), problem, fix="tokenize it again with this model's own processor")
        return images

    def locate(self, index: int) -> str:
        """Where the row stands at its source: ``file, row n``."""
        return f"{self._shards[self._shard_of(index)].file.uri}, row {self._row[index]}"

    def _shard_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        return bisect_right(self._starts, index) - 1


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _make_report(name: str, place: str, index: Index, manifest: Manifest | None) -> StoreReport:
    """With what the manifest says of raw rows that never became rows of the store."""
    rows, kept, dropped = index.rows, index.starts[-1], index.dropped
    if manifest is not None:
        if manifest.rows != rows:
            problem = f"holds {rows} rows, its manifest says {manifest.rows}"
            raise DataError(place, problem, fix="copy or write the store again")
        rows = manifest.rows_read
        dropped = dict(Counter(manifest.dropped) + Counter(dropped))
    if rows == 0:
        raise DataError(place, "holds no rows", fix="give a store with rows")
    dropped = {reason: count for reason, count in dropped.items() if count}
    counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    text = f"{sum(dropped.values())} of {rows} rows dropped: {counts}"
    if kept == 0:
        raise DataError(place, text, fix="raise max_length, or see that loss_mask has a 1 after position 0")
    if dropped:
        log.info("%s: %s", name, text)
    return StoreReport(name, rows, kept, dropped, index.tokens, index.targets)
