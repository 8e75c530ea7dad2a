"""Checkpoints: whole or not at all, the latest found again, the old ones removed.

``global_step_N/`` holds ``backend/`` (tensors), ``state.json`` (counters, place in the data, callbacks), ``run.json`` (what
must not change on resume), ``config.json`` and, written last, ``COMPLETE``. The rule: all ranks call each method at the
same time, rank 0 decides, and what goes wrong on one of them is an error on all.
"""

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from burnish.backends.base import Backend, PendingSave
from burnish.backends.comm import Ranks, alone
from burnish.errors import BurnishError, CheckpointError, StorageError
from burnish.log import get_logger
from burnish.storage.files import is_remote, list_files, read_bytes
from burnish.train.behind import Behind
from burnish.train.checkpoint_bucket import BucketPlace, fetch_checkpoint
from burnish.train.checkpoint_files import COMPLETE, Found, folder_name, on_disk, require_complete, verify
from burnish.train.checkpoint_folder import FolderPlace, require_seen

log = get_logger(__name__)


class Place(Protocol):
    """Where checkpoints go. ``list`` and ``remove`` are for rank 0, all else is called on every rank."""

    def uri(self, name: str = "") -> str:
        """What messages call the checkpoint ``name``, or the whole."""
        ...

    def draft(self, step: int) -> Path:
        """Where this rank writes its part of the checkpoint of ``step``."""
        ...

    def begin(self, step: int, *, contents: Mapping[str, Any], num_bytes: int) -> str:
        """Make the draft, for ``num_bytes`` of each rank, with ``contents`` as JSON; rank 0 returns a name of this save."""
        ...

    def publish(self, step: int, *, save: str) -> None:
        """Let what all ranks have written count, whatever was there under its name."""
        ...

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        ...

    def recover(self, *, resumed: bool) -> None:
        """Finish what the end of a killed run left almost whole; whether that run is to be ``resumed`` may matter."""
        ...

    def list(self) -> Found:
        """What lies there now."""
        ...

    def remove(self, name: str) -> None:
        """Remove a checkpoint or a leftover; at no moment does half of it count."""
        ...


@dataclass(frozen=True, slots=True)
class _Writing:
    """A checkpoint whose tensors are off the device."""

    step: int
    save: str
    tensors: PendingSave


class Checkpointer:
    """Writes the checkpoints of a run and finds the one to resume from.

    Args:
        place: a folder that all ranks see, or an s3:// or gs:// URI; empty for a run without checkpoints.
        ranks: all that write and read them.
        keep: how many of the newest are kept; -1 keeps all.
        run: what must not change on resume, JSON-ready.
        config: kept beside the tensors, JSON-ready.
        cache_dir: where what goes to a bucket, or comes from there, lies meanwhile; none is the user's cache.
    """

    def __init__(
        self,
        place: str,
        *,
        ranks: Ranks,
        keep: int = -1,
        run: Mapping[str, Any],
        config: Mapping[str, Any],
        cache_dir: str | None = None,
    ) -> None:
        self._place = _open_place(place, ranks=ranks, cache_dir=cache_dir) if place else None
        self._ranks = ranks
        self._keep = keep
        self._run = dict(run)
        self._config = dict(config)
        self._cache_dir = cache_dir
        self._begun: _Writing | None = None
        self._behind = Behind(ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """A checkpoint begun before a failure is completed; a user who interrupts does not want to wait for it."""
        if kind is None:
            self.finish()
        elif issubclass(kind, Exception):
            self._publish_begun()
            self._behind.leave()

    @property
    def enabled(self) -> bool:
        """Whether the run has a place for checkpoints."""
        return self._place is not None

    def save(self, backend: Backend, *, step: int, state: Mapping[str, Any]) -> str:
        """Begin the checkpoint of ``step``; training may go on when this returns.

        Args:
            backend: writes its tensors.
            step: number in the folder's name.
            state: JSON-ready; what ``read`` gives back.

        Returns:
            Where it will stand once it is complete.

        Raises:
            CheckpointError: this one cannot be begun, or the one before could not be completed.
        """
        assert self._place is not None
        self.finish()
        place, draft = self._place, self._place.draft(step)
        contents = {"state": state, "run": self._run, "config": self._config}
        begun: list[PendingSave] = []

        def begin_tensors() -> None:
            with on_disk(draft):
                begun.append(backend.save(draft / "backend"))

        with self._abandoned_if_it_fails(step):
            save = self._ranks.of_each(lambda: place.begin(step, contents=contents, num_bytes=backend.save_bytes))[0]
            self._ranks.of_each(begin_tensors)
        self._begun = _Writing(step, save, begun[0])
        return place.uri(folder_name(step))

    def poll(self) -> None:
        """Bring the checkpoint being written further, without waiting.

        Called once a step's metrics are logged, so that no complete checkpoint knows of a step whose metrics are lost.

        Raises:
            CheckpointError: it could not be written, on whichever rank.
        """
        if self._begun:
            self._publish_begun()
        else:
            self._behind.poll()

    def finish(self) -> None:
        """Wait for the checkpoint being written, if any, until it is complete.

        Raises:
            CheckpointError: it could not be written, on whichever rank.
        """
        self._publish_begun()
        self._behind.finish()

    def recover(self, resume_from: str) -> None:
        """Before ``find`` in a run that will save: finish what a killed one has left almost whole."""
        if self._place:
            self._place.recover(resumed=resume_from == "latest")

    def begin_afresh(self) -> None:
        """Say that there are checkpoints already where a run that resumes none will put its own."""
        place = self._place
        steps = self._ranks.of_first(lambda: place.list().complete) if place else []
        if place and steps and self._ranks.rank == 0:
            fix = "give it a ckpt_path of its own, or resume_from=latest to go on"
            log.warning("%s has checkpoints of another run, up to step %d: %s", place.uri(), max(steps), fix)

    def find(self, resume_from: str) -> Path | None:
        """The checkpoint that ``resume_from`` names: ``""``, ``latest`` or the path or URI of a ``global_step_N``.

        Returns:
            Its folder on this machine, verified; ``None`` for a fresh start.

        Raises:
            CheckpointError: the path is missing or not complete, or a file is not as written.
        """
        chosen = self._ranks.of_first(self._latest) if resume_from == "latest" else resume_from
        if not chosen:
            return None
        return open_checkpoint(chosen, ranks=self._ranks, cache_dir=self._cache_dir)

    def read(self, checkpoint: str | Path, *, allow_changes: bool) -> dict[str, Any]:
        """The state in ``checkpoint``, once its run is found to fit; of one in a bucket, no tensor is fetched for it.

        Raises:
            CheckpointError: the run differs from the checkpoint's.
        """
        state: dict[str, Any] = self._ranks.of_first(lambda: self._read(str(checkpoint), allow_changes=allow_changes))
        return state

    def _read(self, checkpoint: str, *, allow_changes: bool) -> Any:
        changes = _differences(_read_json(f"{checkpoint}/run.json"), self._run)
        if changes and not allow_changes:
            raise CheckpointError(
                checkpoint,
                "this run differs from the checkpoint's: " + "; ".join(changes),
                fix="restore the old values, or set resume_allow_changes=true to go on with the new ones",
            )
        for change in changes:
            log.warning("resuming with a change: %s", change)
        return _read_json(f"{checkpoint}/state.json")

    def _latest(self) -> str | None:
        assert self._place is not None
        found = self._place.list()
        newest = max(found.complete, default=-1)
        passed_over = sorted(name for name, step in found.incomplete.items() if step > newest)
        if passed_over:
            log.warning("%s: not complete, passed over: %s", self._place.uri(), ", ".join(passed_over))
        if newest < 0:
            log.warning("%s: no complete checkpoint; starting fresh", self._place.uri())
            return None
        return self._place.uri(folder_name(newest))

    def _publish_begun(self) -> None:
        writing, self._begun = self._begun, None
        if writing:
            self._behind.start(lambda: self._publish(writing))

    def _publish(self, writing: _Writing) -> None:
        assert self._place is not None
        with self._abandoned_if_it_fails(writing.step):
            writing.tensors.wait()
            self._place.publish(writing.step, save=writing.save)
        if self._ranks.rank == 0:
            log.info("checkpoint %s is complete", self._place.uri(folder_name(writing.step)))
            self._tidy(self._place, writing.step)

    def _tidy(self, place: Place, newest: int) -> None:
        """Remove what ``keep`` does not keep, and leftovers. The one just written stays, and those of a higher step."""
        try:
            found = place.list()
            older = [step for step in found.complete if step < newest]
            for step in older[: max(0, len(older) - (self._keep - 1))] if self._keep > 0 else ():
                place.remove(folder_name(step))
                log.info("removed checkpoint %s: max_ckpts_to_keep=%d", place.uri(folder_name(step)), self._keep)
            for name in found.leftovers:
                place.remove(name)
        except StorageError as error:
            raise CheckpointError(error.where, error.problem, fix=error.fix) from error

    @contextmanager
    def _abandoned_if_it_fails(self, step: int) -> Iterator[None]:
        assert self._place is not None
        try:
            yield
        except BurnishError:
            self._place.abandon(step)
            raise


def complete_checkpoints(place: str | Path) -> dict[int, str]:
    """The complete checkpoints at ``place``, a folder or URI: the path or URI of each by its step."""
    opened = _open_place(str(place), ranks=alone(), cache_dir=None)
    return {step: opened.uri(folder_name(step)) for step in opened.list().complete}


def open_checkpoint(place: str, *, ranks: Ranks, cache_dir: str | None = None) -> Path:
    """The checkpoint at ``place``, a path or URI, as a folder on this machine whose files are as they were written.

    Raises:
        BurnishError: it is missing or not complete, a file is not as written, or it cannot be fetched.
    """
    if is_remote(place):
        return _bring_to_nodes(place, ranks, cache_dir)
    ranks.of_first(lambda: require_complete(Path(place)))

    def verify_part() -> None:
        require_seen(Path(place) / COMPLETE)
        verify(Path(place), part=ranks.rank, parts=ranks.world_size)

    ranks.of_each(verify_part, meeting="checkpoint")
    return Path(place)


def _bring_to_nodes(uri: str, ranks: Ranks, cache_dir: str | None) -> Path:
    nodes = ranks.gather(platform.node())
    here = [rank for rank, node in enumerate(nodes) if node == platform.node()]

    def bring() -> str:
        folder = fetch_checkpoint(uri, cache_dir=cache_dir)
        verify(folder, part=here.index(ranks.rank), parts=len(here))
        return str(folder)

    return Path(ranks.of_each(bring, meeting="checkpoint")[ranks.rank])


def _open_place(place: str, *, ranks: Ranks, cache_dir: str | None) -> Place:
    if is_remote(place):
        return BucketPlace(place, ranks=ranks, cache_dir=cache_dir)
    return FolderPlace(Path(place), ranks=ranks)


def _read_json(place: str) -> Any:
    return json.loads(b"".join(map(read_bytes, list_files(place))))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = sorted(old.keys() | new.keys())
    return [f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]
