"""Objects of a bucket become files on this machine, fetched once, whole, under their names; and files become objects.

Each object is read in ranges of one version of it, several at a time, and appended to a hidden file that gets its name
when its size and checksum are right. The folder gets its own name last; a fetch that was killed goes on where it was.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock

from burnish.errors import StorageError
from burnish.log import get_logger
from burnish.storage.bucket import Bucket, open_bucket
from burnish.storage.cache import cache_root, private_folder, publish_once, published
from burnish.storage.files import File, canonical, file_digest, is_remote

log = get_logger(__name__)

RANGE_BYTES = 1 << 23
THREADS = 8
PROGRESS_SECONDS = 5.0
INDEX_NAME = ".index.json"
"""Hidden, as no object that is fetched."""
SENT_NAME = ".sent"
"""Which files of a folder were sent, with the ETags they got, a line each."""
_MD5 = re.compile(r'"([0-9a-f]{32})"')


def fetch(
    place: str | Path,
    files: Sequence[File],
    *,
    checksums: Mapping[str, str] | None = None,
    cache_dir: str | Path | None = None,
    force_recache: bool = False,
    disable_cache: bool = False,
) -> Path:
    """The local folder in which ``files``, listed at ``place``, lie by their names; of a local place, itself.

    Args:
        place: a local path, or the URI of a folder or an object.
        files: those of them that are wanted.
        checksums: SHA-256 of some files by their names, compared with what came.
        cache_dir: root of the cache; ``None`` is the user's.
        force_recache: fetch anew what is there.
        disable_cache: fetch into a folder of this process alone, removed when it exits.

    Raises:
        StorageError: an object cannot be had, is damaged or changed meanwhile; or the disk is full or read-only.
    """
    if not is_remote(place):
        return Path(place).parent if Path(place).is_file() else Path(place)
    root = private_folder() if disable_cache else cache_root(cache_dir)
    uri, bucket = canonical(place), open_bucket(str(place))[0]
    job = _Job(uri, bucket, files, checksums or {})
    home = root / "objects" / _digest(uri)
    target = home / _digest([[file.name, file.identity] for file in files])
    current = published(target)
    again = force_recache or (current is not None and not job.is_whole(current))
    if current and not again:
        log.info("%s: %d objects, unchanged, are in the cache", place, len(files))
    build = partial(job.build, reuse=None if again else home)
    return publish_once(target, build=build, force=again, resumable=True)


class _Job:
    """Objects that are about to be fetched."""

    def __init__(self, uri: str, bucket: Bucket, files: Sequence[File], checksums: Mapping[str, str]) -> None:
        self._uri = uri
        self._bucket = bucket
        self._files = files
        self._checksums = checksums
        self._etags_are_md5 = True

    def is_whole(self, folder: Path) -> bool:
        """Whether the files in ``folder`` still have their sizes; a machine that lost power may have lost some."""
        paths = {folder / file.name: file.size for file in self._files}
        return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())

    def build(self, folder: Path, *, reuse: Path | None) -> None:
        """Fetch into ``folder`` what is not in it yet; what an earlier fetch below ``reuse`` had is linked from there."""
        try:
            self._build(folder, reuse)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG):
                raise
            fix = "rename them: one key is a folder of another, or is longer than a file's name may be"
            raise StorageError(self._uri, f"has keys that cannot be files ({error})", fix=fix) from error

    def _build(self, folder: Path, reuse: Path | None) -> None:
        started, unchanged = time.monotonic(), self._link(folder, reuse) if reuse else 0
        missing = [file for file in self._files if not (folder / file.name).is_file()]
        size = sum(file.size - _rewind(folder / file.name, file.size) for file in missing)
        require_space(folder, size)
        counts = f"{len(missing)} of {len(self._files)} objects, {_gib(size)}"
        log.info("%s: fetching %s; %d are unchanged", self._uri, counts, unchanged)
        for file in missing:
            (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(THREADS) as pool:
            try:
                self._fetch(missing, folder, pool)
            finally:
                pool.shutdown(cancel_futures=True)
        objects = [[file.name, file.identity] for file in self._files]
        (folder / INDEX_NAME).write_text(json.dumps({"uri": self._uri, "objects": objects}))
        log.info("%s: fetched %s in %.1f s", self._uri, _gib(size), time.monotonic() - started)

    def _link(self, folder: Path, reuse: Path) -> int:
        """Hard links to objects that are whole in another folder of the same place; returns how many."""
        known: dict[tuple[str, str], Path] = {}
        for index in reuse.glob(f"*/{INDEX_NAME}"):
            known |= {
                (name, version): index.parent / name for name, version in json.loads(index.read_text())["objects"]
            }
        count = 0
        for file in self._files:
            old, new = known.get((file.name, file.identity)), folder / file.name
            if old and not new.exists() and old.is_file() and old.stat().st_size == file.size:
                new.parent.mkdir(parents=True, exist_ok=True)
                with suppress(OSError):  # some file systems have no links: then it is fetched
                    os.link(old, new)
                    count += 1
        return count

    def _fetch(self, files: Sequence[File], folder: Path, pool: ThreadPoolExecutor) -> None:
        """Reads run ahead in ``pool``; this thread alone appends, in order, so that a length says what is there."""
        finished: deque[Future[None]] = deque()
        spoke, done = time.monotonic(), 0
        for file, pieces in self._ranges(files, folder, pool):
            target = folder / file.name
            with _part(target).open("ab") as part:
                part.writelines(pieces)
            done += sum(map(len, pieces))
            if _have(target) == file.size:
                finished.append(pool.submit(self._finish, file, target))
            while finished and finished[0].done():
                finished.popleft().result()
            if time.monotonic() - spoke > PROGRESS_SECONDS:
                spoke = time.monotonic()
                log.info("%s: %s fetched", self._uri, _gib(done))
        for each in finished:
            each.result()

    def _ranges(
        self, files: Sequence[File], folder: Path, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[File, Sequence[bytes]]]:
        ahead: deque[tuple[File, Future[Sequence[bytes]]]] = deque()
        for file in files:
            assert file.source
            # An empty object has one range too, so that it is made.
            for start in range(_have(folder / file.name), max(file.size, 1), RANGE_BYTES):
                stop = min(start + RANGE_BYTES, file.size)
                ahead.append((file, pool.submit(self._bucket.read, file.source, start=start, stop=stop)))
                if len(ahead) >= THREADS:
                    first, pieces = ahead.popleft()
                    yield first, pieces.result()
        for first, pieces in ahead:
            yield first, pieces.result()

    def _finish(self, file: File, target: Path) -> None:
        """Give the whole file its name.

        Raises:
            StorageError: it is not what the bucket, or the manifest, says it is.
        """
        part = _part(target)
        expected = self._checksums.get(file.name)
        if expected and file_digest(part, "sha256") != expected:
            part.unlink()
            fix = "start again, as it may be damaged on the way; else write it anew, or take another one"
            raise StorageError(file.uri, "differs from the checksum that was written with it", fix=fix)
        if not expected and self._etags_are_md5:
            self._compare_etag(file, part)
        part.rename(target)

    def _compare_etag(self, file: File, part: Path) -> None:
        """The ETag of an object written at once is its MD5, unless the bucket encrypts with keys of its own."""
        assert file.source
        etag = _MD5.fullmatch(file.source.etag or "")
        if not etag or (came := file_digest(part, "md5")) == etag[1]:
            return
        # Bytes that are damaged on the way do not come twice alike.
        with part.open("wb") as again:
            for start in range(0, file.size, RANGE_BYTES):
                again.writelines(self._bucket.read(file.source, start=start, stop=min(start + RANGE_BYTES, file.size)))
        second = file_digest(part, "md5")
        if second not in (came, etag[1]):
            part.unlink()
            raise StorageError(
                file.uri, "comes damaged, and otherwise each time", fix="check the network, then start again"
            )
        self._etags_are_md5 = second == etag[1]


def upload(folder: Path, place: str, *, last: str) -> None:
    """Make every file below ``folder`` an object below ``place``, the one of the name ``last`` after all others.

    Raises:
        StorageError: an object cannot be written, or ``last`` is there already.
    """
    bucket, key = open_bucket(place)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    _each([n for n in names if n != last], lambda name: bucket.write(f"{key}/{name}", folder / name))
    bucket.write(f"{key}/{last}", (folder / last).read_bytes(), new=True)
    log.info("%s: wrote %d objects", place, len(names))


def send(folder: Path, place: str, *, names: Sequence[str]) -> None:
    """Make the files ``names`` of ``folder`` objects below ``place``, in any order, in the place of what was there.

    What was sent before from this folder, and is still there, is not sent again: each file that has come is noted.

    Raises:
        StorageError: an object cannot be written.
    """
    started, (bucket, key), notes = time.monotonic(), open_bucket(place), folder / SENT_NAME
    lines = notes.read_text().splitlines(keepends=True) if notes.is_file() else []
    # A kill may have torn the last line.
    noted = dict(json.loads(line) for line in lines if line.endswith("\n"))
    there = {found.key: found.etag for found in bucket.list(key)} if noted else {}
    missing = [name for name in names if not noted.get(name) or there.get(f"{key}/{name}") != noted[name]]
    if len(missing) < len(names):
        log.info("%s: %d of %d files are there already", place, len(names) - len(missing), len(names))
    writing = Lock()
    with notes.open("w") as stream:
        stream.writelines(json.dumps([name, etag]) + "\n" for name, etag in noted.items())

        def write(name: str) -> None:
            etag = bucket.write(f"{key}/{name}", folder / name)
            with writing:
                stream.write(json.dumps([name, etag]) + "\n")
                stream.flush()

        _each(missing, write)
    size = _gib(sum((folder / name).stat().st_size for name in missing))
    log.info("%s: sent %d files, %s, in %.1f s", place, len(missing), size, time.monotonic() - started)


def clear(place: str, *, last: str = "") -> None:
    """Remove every object below ``place``, the one of the name ``last`` after all others.

    Raises:
        StorageError: an object cannot be removed.
    """
    bucket, key = open_bucket(place)
    keys = [found.key for found in bucket.list(key)]
    _each([k for k in keys if k != f"{key}/{last}"], bucket.delete)
    if f"{key}/{last}" in keys:
        bucket.delete(f"{key}/{last}")


def _each(names: Sequence[str], action: Callable[[str], object]) -> None:
    """Several at a time; the first error ends it."""
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for done in [pool.submit(action, name) for name in names]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _rewind(target: Path, size: int) -> int:
    """Take the last range off what was fetched if it was all, so that the end is reached once more; returns what is left."""
    have = min(_have(target), max(size - 1, 0) // RANGE_BYTES * RANGE_BYTES)
    if _part(target).exists():
        os.truncate(_part(target), have)
    return have


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _have(target: Path) -> int:
    """Bytes of ``target`` that were fetched so far."""
    part = _part(target)
    return part.stat().st_size if part.exists() else 0


def require_space(folder: Path, size: int) -> None:
    """See that ``size`` bytes have room in ``folder``.

    Raises:
        StorageError: they have not.
    """
    free = shutil.disk_usage(folder).free
    if free < size:
        fix = "free some space, or set cache_dir to a folder with more"
        raise StorageError(str(folder.parent), f"is full ({_gib(size)} are needed, {_gib(free)} are free)", fix=fix)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
