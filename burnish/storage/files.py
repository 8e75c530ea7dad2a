"""The files under a path, and what tells one version of a file from another."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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
    """The file at ``path``, which must exist."""
    stat = path.stat()
    return File(
        path, name or path.name, stat.st_size, f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    )


def list_files(folder: Path) -> list[File]:
    """All files below ``folder`` in sorted order of their names; hidden and underscore-prefixed entries are left out.

    Links are followed. The name of ``folder`` itself may be hidden.
    """
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
