"""The files at a place, local or in a bucket, and what tells one version of a file from another."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from burnish.errors import StorageError
from burnish.storage.bucket import Object, open_bucket


@dataclass(frozen=True, slots=True)
class File:
    """One file as it is now, where it lies."""

    uri: str
    """Its local path, or s3:// or gs:// and so on: what messages call it."""
    name: str
    """Its path below the folder that was listed, with ``/`` between the parts."""
    size: int
    """Bytes."""
    identity: str
    """Changes when the file is replaced or written in place, also within the same second and at the same size."""
    source: Object | None = None
    """What it is in its bucket; none of a local file."""


def is_remote(place: str | Path) -> bool:
    """Whether ``place`` is a URI and no local path."""
    return "://" in str(place)


def canonical(place: str | Path) -> str:
    """``place`` as listings and caches call it: one spelling for each URI, a local path as it is.

    Raises:
        StorageError: it is a URI of no bucket.
    """
    if not is_remote(place):
        return str(Path(place).expanduser())
    bucket, key = open_bucket(str(place))
    return bucket.uri(key)


def describe_file(path: Path, *, name: str = "") -> File:
    """The local file at ``path``.

    Raises:
        StorageError: it is not there, or may not be looked at.
    """
    with _named(path):
        stat = path.stat()
    identity = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    return File(str(path), name or path.name, stat.st_size, identity)


def list_files(place: str | Path, *, also: Sequence[str] = ()) -> list[File]:
    """All files below ``place`` in sorted order of their names, or the one it is; none where nothing is.

    Hidden and underscore-prefixed entries are left out, but for files of a name in ``also``. Links are followed. The
    name of ``place`` itself may be hidden.

    Raises:
        StorageError: a folder may not be listed, a link leads nowhere, or the bucket does not answer.
    """
    if is_remote(place):
        return _list_objects(str(place), also)
    path = Path(place)
    if path.is_file():
        return [describe_file(path)]
    if not path.exists():
        return []
    with _named(path):
        paths = {found.relative_to(path).as_posix(): found for found in _walk(path, frozenset(), also)}
    return [describe_file(paths[name], name=name) for name in sorted(paths)]


def read_bytes(file: File) -> bytes:
    """All of a small file.

    Raises:
        StorageError: it cannot be read, or was replaced since it was listed.
    """
    if file.source:
        bucket, _ = open_bucket(file.uri)
        return b"".join(bucket.read(file.source))
    with _named(Path(file.uri)):
        return Path(file.uri).read_bytes()


def file_digest(path: Path, kind: str) -> str:
    """The ``kind`` of hash, such as ``sha256``, of a local file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, kind).hexdigest()


def _list_objects(place: str, also: Sequence[str]) -> list[File]:
    bucket, key = open_bucket(place)
    files = []
    for found in bucket.list(key):
        name = found.key.removeprefix(key + "/") if found.key != key else key.rpartition("/")[2]
        folders, _, last = name.rpartition("/")
        kept = (*filter(None, folders.split("/")), *(() if last in also or found.key == key else (last,)))
        if not any(part.startswith((".", "_")) for part in kept):
            files.append(File(bucket.uri(found.key), name, found.size, f"{found.size} {found.version}", found))
    return files


def _walk(folder: Path, above: frozenset[str], also: Sequence[str]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in above:
        return
    for entry in folder.iterdir():
        if entry.name.startswith((".", "_")) and entry.name not in also:
            continue
        if entry.is_dir():
            yield from _walk(entry, above | {real}, also)
        else:
            yield entry


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            str(path), f"cannot be read ({error})", fix="see that it is there and may be read"
        ) from error
