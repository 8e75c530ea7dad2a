"""Tasks on several cores, in processes that end with this one.

The rule: results come in the order of the tasks, so that of several errors the same one is raised each time.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from burnish.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

GUARD = "guard your script with `if __name__ == '__main__':`"
_OWNER = "BURNISH_POOL_OWNER"
"""Set in the environment of these processes, to the id of the one they work for."""


def refuse_in_pool(where: str) -> None:
    """Called before what may start processes: each of them runs a script without main guard anew, from its top.

    Raises:
        DataError: this is one of them.
    """
    if os.environ.get(_OWNER, str(os.getpid())) != str(os.getpid()):
        raise DataError(where, "a process that helps with this has started the whole script again", fix=GUARD)


def map_in_processes(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    num_workers: int,
    start: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
) -> Iterator[Result]:
    """What ``work`` makes of each task.

    Args:
        work: called in one of the processes; what it raises is raised here.
        tasks: what to call it with.
        num_workers: processes.
        start: called first in each, with ``arguments``.
        arguments: what it needs.

    Raises:
        BrokenProcessPool: a process died.
    """
    os.environ[_OWNER] = str(os.getpid())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, _start, (start, arguments))
    try:
        yield from pool.map(work, tasks)
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.pop(_OWNER, None)


def _start(start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start:
        start(*arguments)


def _end_with_parent() -> None:
    """A run that is killed must not leave processes behind that work for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
