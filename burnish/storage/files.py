"""The files under a path, and what tells one version of a file from another."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from burnish.errors import StorageError


@dataclass(frozen=True, slots=True)
class File:
    """One file as it is now."""

    path: Path
    name: str
    """Its path below the folder that was listed, with ``/`` between the parts."""
    size: int
    """Bytes."""
    identity: str
    """Changes when the file is replaced or written in place, also within the same second and at the same size."""


def describe_file(path: Path, *, name: str = "") -> File:
    """The file at ``path``.

    Raises:
        StorageError: it is not there, or may not be looked at.
    """
    with _named(path):
        stat = path.stat()
    return File(
        path, name or path.name, stat.st_size, f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    )


def list_files(folder: Path) -> list[File]:
    """All files below ``folder`` in sorted order of their names; hidden and underscore-prefixed entries are left out.

    Links are followed. The name of ``folder`` itself may be hidden.

    Raises:
        StorageError: a folder may not be listed, or a link leads nowhere.
    """
    with _named(folder):
        paths = {path.relative_to(folder).as_posix(): path for path in _walk(folder, frozenset())}
    return [describe_file(paths[name], name=name) for name in sorted(paths)]


def _walk(folder: Path, above: frozenset[str]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in above:
        return
    for entry in folder.iterdir():
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            yield from _walk(entry, above | {real})
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
