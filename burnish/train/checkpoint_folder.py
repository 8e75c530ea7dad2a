"""Checkpoints in a folder that all ranks see. Rank 0 prepares and publishes, all write.

A checkpoint is written under a name that does not count, ``global_step_N.partial``, and renamed when it is whole; one that
goes is renamed before it is emptied, ``global_step_N.removed``. So what carries its name was whole at all times, and what
a kill has left is known by its own.
"""

import platform
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.backends.comm import Ranks
from burnish.errors import CheckpointError
from burnish.log import get_logger
from burnish.train.checkpoint_files import (
    COMPLETE,
    Found,
    complete_text,
    describe,
    folder_name,
    on_disk,
    step_of,
    sync,
    write_json,
)

log = get_logger(__name__)

_PARTIAL, _REMOVED = ".partial", ".removed"
_TO_BE_SEEN = 60.0
"""Seconds."""


class FolderPlace:
    """Implements :class:`burnish.train.checkpoint.Place` for a folder."""

    def __init__(self, folder: Path, *, ranks: Ranks) -> None:
        self._folder = folder
        self._ranks = ranks
        self._is_first = ranks.rank == 0

    def uri(self, name: str = "") -> str:
        """What messages call the checkpoint ``name``, or the whole."""
        return str(self._folder / name)

    def draft(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is written."""
        return self._folder / (folder_name(step) + _PARTIAL)

    def begin(self, step: int, *, contents: Mapping[str, Any], num_bytes: int) -> str:
        """Make room for the checkpoint of ``step`` and write its ``contents``; a full disk is found while writing."""
        del num_bytes
        if self._is_first:
            with on_disk(self.draft(step)):
                _discard(self.draft(step))
                self.draft(step).mkdir(parents=True)
                write_json(self.draft(step), contents)
        return ""

    def publish(self, step: int, *, save: str) -> None:
        """Let what all ranks have written count."""
        del save
        if self._is_first:
            draft = self.draft(step)
            with on_disk(draft):
                text = complete_text(describe(draft))
                unnamed = draft / f".{COMPLETE}"
                unnamed.write_text(text)
                sync(unnamed)
                unnamed.rename(draft / COMPLETE)
                self._rename(draft)

    def abandon(self, step: int) -> None:
        """Remove what was written of ``step``."""
        if self._is_first:
            shutil.rmtree(self.draft(step), ignore_errors=True)

    def list(self) -> Found:
        """What lies there now; whatever is called otherwise is left out."""
        complete, incomplete, leftovers = [], {}, []
        for path in self._folder.glob("global_step_*"):
            step, passing = step_of(path.name), step_of(path.stem) if path.suffix in (_PARTIAL, _REMOVED) else None
            if step is not None and (path / COMPLETE).is_file():
                complete.append(step)
            elif step is not None and path.is_dir():
                incomplete[path.name] = step
            elif passing is not None:
                leftovers.append(path.name)
                if path.suffix == _PARTIAL:
                    incomplete[path.name] = passing
        return Found(tuple(sorted(complete)), incomplete, tuple(leftovers))

    def remove(self, name: str) -> None:
        """Remove a checkpoint or a leftover; of a link, the link alone."""
        path = self._folder / name
        with on_disk(path):
            _discard(_retired(path) if step_of(name) is not None else path)

    def recover(self, *, resumed: bool) -> None:
        """Give a checkpoint its name that lacks nothing else, because its run was killed then.

        Raises:
            CheckpointError: a rank does not see what rank 0 writes.
        """
        del resumed
        probe = self._folder / ".burnish-probe"
        self._ranks.of_each(lambda: self._probe(probe))
        if not self._is_first:
            return
        with on_disk(self._folder):
            probe.unlink()
            for draft in self._folder.glob(f"global_step_*{_PARTIAL}"):
                if step_of(draft.stem) is not None and (draft / COMPLETE).is_file():
                    self._rename(draft)
                    log.info("checkpoint %s is complete: only its name was missing", draft.with_suffix(""))

    def _probe(self, probe: Path) -> None:
        if not self._is_first:
            require_seen(probe)
            return
        with on_disk(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            probe.touch()

    def _rename(self, draft: Path) -> None:
        """Of an earlier checkpoint of this step, if there is one, one of both is whole at any time."""
        target = draft.with_suffix("")
        old = _retired(target) if target.exists() or target.is_symlink() else None
        draft.rename(target)
        sync(target.parent)
        if old:
            _discard(old)


def require_seen(file: Path) -> None:
    """Wait until ``file``, which rank 0 sees, is seen here too: disks of a network may show it later.

    Raises:
        CheckpointError: it is not there after a minute.
    """
    deadline = time.monotonic() + _TO_BE_SEEN
    while not file.is_file():
        if time.monotonic() > deadline:
            problem = f"is there for rank 0, but not on {platform.node()}"
            raise CheckpointError(str(file), problem, fix="use a disk that all nodes share, or a bucket")
        time.sleep(_TO_BE_SEEN / 100)


def _retired(path: Path) -> Path:
    removed = path.with_name(path.name + _REMOVED)
    _discard(removed)
    return path.rename(removed)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        (path / COMPLETE).unlink(missing_ok=True)  # what is removed halfway must not look whole
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
