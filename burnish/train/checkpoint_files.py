"""What makes a folder a checkpoint: ``COMPLETE``, written last, with the size and checksum of every other file."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from burnish.errors import CheckpointError
from burnish.storage.files import file_digest

COMPLETE = "COMPLETE"
_FORMAT_VERSION = 2
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_OLDER = "resume from an older checkpoint"
_THREADS = 8


class Fact(TypedDict):
    """What a file is known by."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Found:
    """What lies where checkpoints go."""

    complete: tuple[int, ...]
    """Steps, in order."""
    incomplete: Mapping[str, int]
    """The steps of those that were not written to their end, by name."""
    leftovers: tuple[str, ...]
    """Names of what a killed run of ours has left behind."""


def folder_name(step: int) -> str:
    """What the checkpoint of ``step`` is called."""
    return f"global_step_{step}"


def step_of(name: str) -> int | None:
    """The step of the checkpoint called ``name``; none when it is no checkpoint's name."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def write_json(folder: Path, contents: Mapping[str, Any]) -> None:
    """Write each of ``contents`` into ``folder``, as NAME.json."""
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True))


def describe(folder: Path) -> dict[str, Fact]:
    """Each file below ``folder`` by its name there; all of them are on the disk afterwards."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_THREADS) as pool:
        facts = list(pool.map(_describe_file, files))
    return {path.relative_to(folder).as_posix(): fact for path, fact in zip(files, facts, strict=True)}


def complete_text(files: Mapping[str, Fact]) -> str:
    """What ``COMPLETE`` says."""
    return json.dumps({"format_version": _FORMAT_VERSION, "files": files}, indent=1)


def read_complete(text: str, *, where: str) -> dict[str, Fact]:
    """The files that a ``COMPLETE`` names, of the checkpoint at ``where``.

    Raises:
        CheckpointError: it is not as it was written, or of another format.
    """
    try:
        complete = json.loads(text)
        version, files = complete["format_version"], complete["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}/{COMPLETE}", "is not as it was written", fix=_OLDER) from error
    if version != _FORMAT_VERSION:
        problem = f"has format {version}; this version reads {_FORMAT_VERSION}"
        raise CheckpointError(where, problem, fix="use the version of Burnish that wrote it")
    return dict(files)


def require_complete(checkpoint: Path) -> None:
    """See that ``checkpoint`` was written to its end.

    Raises:
        CheckpointError: it was not, or is not there.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(str(checkpoint), "no such checkpoint", fix="give the path of a global_step_N folder")
    if not (checkpoint / COMPLETE).is_file():
        raise incomplete(str(checkpoint))


def incomplete(where: str) -> CheckpointError:
    """The error of a checkpoint at ``where`` that was not written to its end."""
    return CheckpointError(
        where, f"has no {COMPLETE} file: it is no checkpoint, or not whole", fix="name a global_step_N that has one"
    )


def verify(checkpoint: Path, *, part: int = 0, parts: int = 1) -> None:
    """Compare every file of ``checkpoint``, or one part of ``parts`` of them, with what was written.

    Raises:
        CheckpointError: it is missing, not complete, or a file's size or checksum differs.
    """
    require_complete(checkpoint)
    files = read_complete((checkpoint / COMPLETE).read_text(), where=str(checkpoint))
    names = sorted(files)[part::parts]
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, problem in zip(names, pool.map(lambda n: _difference(checkpoint / n, files[n]), names), strict=True):
            if problem:
                raise CheckpointError(str(checkpoint / name), problem, fix=_OLDER)


def is_as_described(folder: Path, files: Mapping[str, Fact]) -> bool:
    """Whether every one of ``files`` lies in ``folder`` as it was written."""
    return not any(_difference(folder / name, fact) for name, fact in files.items())


def sync(path: Path) -> None:
    """Return when ``path`` would outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def on_disk(place: Path) -> Iterator[None]:
    """Writing at ``place``: what goes wrong there is said with it.

    Raises:
        CheckpointError: something could not be written.
    """
    try:
        yield
    except OSError as error:
        fix = "see that the disk has room and can be written"
        raise CheckpointError(str(place), f"could not be written: {error}", fix=fix) from error


def _describe_file(file: Path) -> Fact:
    sync(file)
    return {"size": file.stat().st_size, "sha256": file_digest(file, "sha256")}


def _difference(file: Path, expected: Fact) -> str:
    if not file.is_file():
        return "is missing"
    same = file.stat().st_size == expected["size"] and file_digest(file, "sha256") == expected["sha256"]
    return "" if same else "is not as it was written"
