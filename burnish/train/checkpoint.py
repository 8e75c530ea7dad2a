"""Checkpoints: whole or not at all, the latest found again, the old ones removed.

``{folder}/global_step_N/`` holds ``backend/`` (tensors), ``state.json`` (counters, place in the data, callbacks),
``run.json`` (what must not change on resume), ``config.json`` and, written last, ``COMPLETE``. The folder carries
another name until then, so a half-written checkpoint never looks like one.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from burnish.backends.base import Backend, PendingSave
from burnish.errors import CheckpointError
from burnish.log import get_logger

log = get_logger(__name__)

COMPLETE = "COMPLETE"
_FORMAT_VERSION = 1
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_PARTIAL = ".partial"
_OLDER = "resume from an older checkpoint"


@dataclass(slots=True)
class _Writing:
    """A checkpoint on its way to disk: first the tensors, then checksums and the name it will carry."""

    partial: Path
    target: Path
    tensors: PendingSave
    publishing: Future[None] | None = None


class Checkpointer:
    """Writes the checkpoints of a run and finds the one to resume from."""

    def __init__(
        self, folder: Path | None, *, keep: int = -1, run: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._run = dict(run)
        self._config = dict(config)
        self._writing: _Writing | None = None
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """A checkpoint begun before a failure is completed; a user who interrupts does not want to wait for it."""
        if kind is None or issubclass(kind, Exception):
            self.finish()

    @property
    def enabled(self) -> bool:
        """Whether the run has a place for checkpoints."""
        return self._folder is not None

    def save(self, backend: Backend, *, step: int, state: Mapping[str, Any]) -> Path:
        """Begin the checkpoint of ``step``; training may go on when this returns.

        Args:
            backend: writes its tensors.
            step: number in the folder's name.
            state: JSON-ready; what ``resume`` gives back.

        Returns:
            The folder that will stand once the checkpoint is complete.
        """
        assert self._folder is not None
        self.finish()
        target = self._folder / f"global_step_{step}"
        partial = target.with_name(target.name + _PARTIAL)
        with _on_disk(partial):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for name, content in (("state", state), ("run", self._run), ("config", self._config)):
                (partial / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True))
            self._writing = _Writing(partial, target, backend.save(partial / "backend"))
        return target

    def poll(self) -> None:
        """Bring the checkpoint being written further, without waiting.

        Called once a step's metrics are logged, so that no complete checkpoint knows of a step whose metrics are lost.
        """
        if self._writing is None or not self._writing.tensors.done:
            return
        if self._writing.publishing is None:
            self._writing.publishing = self._publisher.submit(self._complete, self._writing)
        elif self._writing.publishing.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint being written, if any, until it is complete."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        if writing.publishing is not None:
            writing.publishing.result()
        else:
            self._complete(writing)

    def _complete(self, writing: _Writing) -> None:
        writing.tensors.wait()
        with _on_disk(writing.target):
            _publish(writing.partial, target=writing.target)
            log.info("checkpoint %s is complete", writing.target)
            self._remove_old(writing.target)

    def find(self, resume_from: str) -> Path | None:
        """The checkpoint that ``resume_from`` names: ``""``, ``latest`` or the path of a ``global_step_N``.

        Returns:
            Its folder, verified; ``None`` for a fresh start.

        Raises:
            CheckpointError: the path is missing or not complete, or a file is not as written.
        """
        if not resume_from:
            return None
        found = self._latest() if resume_from == "latest" else Path(resume_from)
        if found:
            verify(found)
        return found

    def _latest(self) -> Path | None:
        assert self._folder is not None
        complete = complete_checkpoints(self._folder)
        newest = max(complete, default=-1)
        incomplete = [p.name for p in _incomplete_checkpoints(self._folder) if _step_of(p) > newest]
        if incomplete:
            log.warning("%s: not complete, passed over: %s", self._folder, ", ".join(incomplete))
        if not complete:
            log.warning("%s: no complete checkpoint; starting fresh", self._folder)
            return None
        return complete[newest]

    def read(self, checkpoint: Path, *, allow_changes: bool) -> dict[str, Any]:
        """The state in ``checkpoint``, once its run is found to fit.

        Raises:
            CheckpointError: the run differs from the checkpoint's.
        """
        changes = _differences(json.loads((checkpoint / "run.json").read_text()), self._run)
        if changes and not allow_changes:
            raise CheckpointError(
                str(checkpoint),
                "this run differs from the checkpoint's: " + "; ".join(changes),
                fix="restore the old values, or set resume_allow_changes=true to go on with the new ones",
            )
        for change in changes:
            log.warning("resuming with a change: %s", change)
        state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
        return state

    def _remove_old(self, newest: Path) -> None:
        assert self._folder is not None
        if self._keep < 0:
            return
        older = {step: p for step, p in complete_checkpoints(self._folder).items() if step < _step_of(newest)}
        for step in sorted(older)[: max(0, len(older) - (self._keep - 1))]:
            _remove(older[step])
            log.info("removed checkpoint %s: max_ckpts_to_keep=%d", older[step], self._keep)


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in ``folder`` by step; whatever else lies there is left out."""
    found = (p for p in folder.glob("global_step_*") if _STEP_FOLDER.fullmatch(p.name) and (p / COMPLETE).is_file())
    return {_step_of(p): p for p in found}


def verify(checkpoint: Path) -> None:
    """Compare every file of ``checkpoint`` with what was written.

    Raises:
        CheckpointError: it is missing, not complete, or a file's size or checksum differs.
    """
    _require_complete(checkpoint)
    try:
        complete = json.loads((checkpoint / COMPLETE).read_text())
    except ValueError as error:
        raise CheckpointError(str(checkpoint / COMPLETE), "is not as it was written", fix=_OLDER) from error
    if complete["format_version"] != _FORMAT_VERSION:
        raise CheckpointError(
            str(checkpoint), f"has format {complete['format_version']}; this version reads {_FORMAT_VERSION}"
        )
    for name, expected in complete["files"].items():
        file = checkpoint / name
        if not file.is_file():
            raise CheckpointError(str(file), "is missing", fix=_OLDER)
        if file.stat().st_size != expected["size"] or _checksum(file) != expected["sha256"]:
            raise CheckpointError(str(file), "is not as it was written", fix=_OLDER)


def _publish(partial: Path, *, target: Path) -> None:
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    facts = {str(p.relative_to(partial)): {"size": p.stat().st_size, "sha256": _checksum(p)} for p in files}
    for file in files:
        _sync(file)
    (partial / COMPLETE).write_text(json.dumps({"format_version": _FORMAT_VERSION, "files": facts}, indent=1))
    _sync(partial / COMPLETE)
    if target.exists():  # of an earlier run in the same folder, or incomplete
        replaced = target.with_name(target.name + ".replaced")
        _remove(replaced)
        target.rename(replaced)
        partial.rename(target)
        _remove(replaced)
    else:
        partial.rename(target)
    _sync(target.parent)


def _remove(path: Path) -> None:
    """A folder with all it holds; of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        (path / COMPLETE).unlink(missing_ok=True)  # an interrupted removal must not look whole
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _on_disk(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "see that the disk has room and can be written"
        raise CheckpointError(str(place), f"could not be written: {error}", fix=fix) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _require_complete(checkpoint: Path) -> None:
    if not checkpoint.is_dir():
        raise CheckpointError(str(checkpoint), "no such checkpoint", fix="give the path of a global_step_N folder")
    if not (checkpoint / COMPLETE).is_file():
        raise CheckpointError(
            str(checkpoint), f"has no {COMPLETE} file: it was not written to its end", fix="resume from another one"
        )


def _incomplete_checkpoints(folder: Path) -> list[Path]:
    found = (p for p in folder.glob("global_step_*") if p.is_dir() and not (p / COMPLETE).is_file())
    return sorted(p for p in found if _STEP_FOLDER.fullmatch(p.name.removesuffix(_PARTIAL)))


def _step_of(checkpoint: Path) -> int:
    match = _STEP_FOLDER.match(checkpoint.name)
    assert match is not None
    return int(match.group(1))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = sorted(old.keys() | new.keys())
    return [f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]
