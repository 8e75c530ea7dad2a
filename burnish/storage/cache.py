"""Folders made once and shared by many processes. The rule: a folder that has its name is whole.

Whoever wants a folder that is not there builds it beside its place, under a lock, and renames it in as the last act;
everybody else waits on the lock's file. What a killed builder leaves has no name that counts.
"""

import atexit
import errno
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from filelock import FileLock, Timeout

from burnish.errors import StorageError
from burnish.log import get_logger

log = get_logger(__name__)

RETIRED_SECONDS = 7 * 24 * 3600
"""How long a replaced generation stays: another node may have its files mapped over a network."""
_PRIVATE, _IN_USE = "burnish-private-", ".in-use"
_SECONDS_TO_LOCK = 60.0
"""A private folder is locked long before it is this old."""
_locks: list[FileLock] = []
"""Of this process's private folders, held until it ends."""
_shared: list[Path] = []
"""The one private folder of all processes of a run on this node, if they are several."""
_SILENT_SECONDS = 1.0
"""Whoever waits longer for another process says so."""


class Caching(TypedDict):
    """Where what was fetched or worked out is kept, as the config says it."""

    cache_dir: str | Path | None
    """Root of the cache; ``None`` is the user's."""
    force_recache: bool
    """Fetch and work out anew what is there."""
    disable_cache: bool
    """Use folders of this run alone on each node, removed when it exits."""


def cache_root(cache_dir: str | Path | None) -> Path:
    """Where caches lie: ``cache_dir``, else the environment's ``BURNISH_CACHE``, else the user's cache folder."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if os.environ.get("BURNISH_CACHE"):
        return Path(os.environ["BURNISH_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "burnish"


def share_private_folder(folder: Path) -> None:
    """From now on, :func:`private_folder` is ``folder``, which another process of this node made and will remove."""
    _shared[:] = [folder]


def private_folder() -> Path:
    """A new folder for this process alone, removed when it exits; those that killed processes left are removed too."""
    if _shared:
        return _shared[0]
    for other in Path(tempfile.gettempdir()).glob(f"{_PRIVATE}*"):
        with suppress(OSError, Timeout):  # another user's, gone already, or in use
            if time.time() - (other / _IN_USE).stat().st_mtime > _SECONDS_TO_LOCK:
                FileLock(other / _IN_USE).acquire(timeout=0)
                shutil.rmtree(other)
    holder = Path(tempfile.mkdtemp(prefix=_PRIVATE))
    _locks.append(FileLock(holder / _IN_USE))
    _locks[-1].acquire()
    atexit.register(shutil.rmtree, holder, ignore_errors=True)
    folder = holder / "files"
    folder.mkdir()
    return folder


def publish_once(target: Path, *, build: Callable[[Path], None], force: bool = False, resumable: bool = False) -> Path:
    """The newest generation of ``target``, built by ``build`` unless there is one already.

    Args:
        target: the folder, and the first generation; its name must not begin with a dot.
        build: fills the folder it is given, which is empty unless ``resumable``.
        force: build a new generation, unless another process does so meanwhile. Whoever has the old one keeps it.
        resumable: what ``build`` leaves behind when it fails, or is killed, is given to the next one.

    Raises:
        StorageError: the folder of ``target`` cannot be written, or is full.
    """
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        seen = published(target)
        if seen and not force:
            return seen
        target.parent.mkdir(parents=True, exist_ok=True)
        _acquire(lock, target)
    except OSError as error:
        raise _not_writable(target, error) from error
    try:
        newest = published(target)
        if newest not in (None, seen):
            return newest
        temporary = target.parent / f".{target.name}.building-{'resumed' if resumable else uuid.uuid4().hex}"
        _remove_leftovers(target, newest=newest, keep=temporary)
        _build(target, build, temporary)
        return _publish(temporary, target, newest)
    finally:
        lock.release()


def published(target: Path) -> Path | None:
    """The newest generation of ``target``, which stays where it is also when a newer one comes; none before the first."""
    prefix = f".{target.name}.generation-"
    siblings = target.parent.iterdir() if target.parent.exists() else ()
    numbers = [int(sibling.name.removeprefix(prefix)) for sibling in siblings if sibling.name.startswith(prefix)]
    if numbers:
        return target.with_name(f"{prefix}{max(numbers)}")
    return target if target.exists() else None


def _acquire(lock: FileLock, target: Path) -> None:
    try:
        lock.acquire(timeout=_SILENT_SECONDS)
    except Timeout:
        log.info("waiting for another process that makes %s", target)
        lock.acquire()


def _remove_leftovers(target: Path, *, newest: Path | None, keep: Path) -> None:
    """Called under the lock, where whatever is being built for ``target`` belongs to a dead process."""
    for sibling in list(target.parent.iterdir()):
        mine = sibling.name.startswith(f".{target.name}.building-")
        passing = sibling.name.startswith(".") and ".building-" in sibling.name
        retired = sibling == target or sibling.name.startswith(f".{target.name}.generation-")
        with suppress(FileNotFoundError):  # another process removes old ones too
            old = time.time() - sibling.stat().st_mtime > RETIRED_SECONDS
            if sibling not in (keep, newest) and (mine or (old and (passing or retired))):
                shutil.rmtree(sibling)


def _build(target: Path, build: Callable[[Path], None], temporary: Path) -> None:
    resumed = temporary.name.endswith("-resumed")
    try:
        temporary.mkdir(exist_ok=resumed)
        build(temporary)
    except BaseException as error:
        # Also where a user interrupts, nothing half-built stays; all is raised again.
        if not resumed or not any(path.is_file() for path in temporary.rglob("*")):
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space, or set cache_dir to a folder with more"
            raise StorageError(str(target.parent), f"is full ({os.strerror(error.errno)})", fix=fix) from error
        if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise _not_writable(target, error) from error
        raise


def _publish(temporary: Path, target: Path, newest: Path | None) -> Path:
    """A rename onto a name that was never used, so that no reader finds the old generation gone or both mixed."""
    if newest is None:
        return temporary.rename(target)
    number = 1 if newest == target else int(newest.name.rpartition("-")[2]) + 1
    os.utime(newest)  # retired from now on
    return temporary.rename(target.with_name(f".{target.name}.generation-{number}"))


def _not_writable(target: Path, error: OSError) -> StorageError:
    return StorageError(
        str(target.parent), f"cannot be written ({error})", fix="set cache_dir to a folder you may write"
    )
