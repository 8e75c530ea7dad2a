"""Folders made once and shared by many processes. The rule: a folder that has its name is whole.

Whoever wants a folder that is not there builds it beside its place, under a lock, and renames it in as the last act;
everybody else waits on the lock's file. A killed builder leaves a nameless temporary that the next one removes.
"""

import atexit
import errno
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from burnish.errors import StorageError

RETIRED_SECONDS = 7 * 24 * 3600
"""How long a replaced folder stays under another name: another node may have its files mapped over a network."""


def cache_root(cache_dir: str | Path | None) -> Path:
    """Where caches lie: ``cache_dir``, else the environment's ``BURNISH_CACHE``, else the user's cache folder."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if os.environ.get("BURNISH_CACHE"):
        return Path(os.environ["BURNISH_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "burnish"


def private_folder() -> Path:
    """A new folder for this process alone, removed when it exits."""
    folder = Path(tempfile.mkdtemp(prefix="burnish-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def publish_once(target: Path, *, build: Callable[[Path], None], force: bool = False) -> Path:
    """``target``, built by ``build`` unless it is there already.

    Args:
        target: the folder; its name must not begin with a dot.
        build: fills the empty folder it is given; what it raises leaves nothing behind.
        force: build anew and put it in the place of the old one. Files that a reader has mapped stay readable.

    Raises:
        StorageError: the folder of ``target`` cannot be written, or is full.
    """
    if target.exists() and not force:
        return target
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        fix = "set cache_dir to a folder you may write"
        raise StorageError(str(target.parent), f"cannot be written ({error})", fix=fix) from error
    try:
        if force or not target.exists():
            _remove_leftovers(target)
            _build(target, build)
    finally:
        lock.release()
    return target


def _remove_leftovers(target: Path) -> None:
    """Called under the lock, where whatever is being built for ``target`` belongs to a dead process."""
    building, retired = f".{target.name}.building-", f".{target.name}.retired-"
    for sibling in list(target.parent.iterdir()):
        age = time.time() - int(sibling.name.rpartition("-")[2]) if sibling.name.startswith(retired) else 0
        if sibling.name.startswith(building) or age > RETIRED_SECONDS:
            shutil.rmtree(sibling)


def _build(target: Path, build: Callable[[Path], None]) -> None:
    temporary = target.parent / f".{target.name}.building-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        build(temporary)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space, or set cache_dir to a folder with more"
            raise StorageError(str(target.parent), f"is full ({error})", fix=fix) from error
        raise
    if target.exists():
        target.rename(target.parent / f".{target.name}.retired-{uuid.uuid4().hex}-{int(time.time())}")
    temporary.rename(target)
