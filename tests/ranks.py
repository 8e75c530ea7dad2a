"""Functions run as several ranks of one gloo group, in processes that are kept for the tests that follow."""

import ctypes
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

import psutil
from torch.distributed import DistError, TCPStore

HANG_SECONDS, MOST_THREADS = 300, 100
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal a process gets when the thread that made it ends."""
_kept: dict[tuple[str, int], ProcessPoolExecutor] = {}


def on_ranks(number: int, function: Callable[..., Any], *arguments: Any, pool: str = "") -> list[Any]:
    """What ``function(*arguments)`` returns on each of ``number`` ranks; its ``joined()`` is their group.

    The function is found by its name: it stands at the top of a module. It joins once: ranks that join again may meet the
    store of the group that another has not left yet. An error of a rank is raised: of several, that of one which did not
    only lose the others. Ranks that hang show where, and end. What changes a process for good is run in a ``pool`` of its
    own.
    """
    # Held to the end: a port that was only found may be another's when the ranks come.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    futures = [_process(pool, rank).submit(_as_rank, rank, place, function, arguments) for rank in range(number)]
    errors = [error for future in futures if (error := future.exception())]
    if any(isinstance(error, BrokenProcessPool) for error in errors):
        _kept.clear()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, (RuntimeError, DistError)))
    results = [future.result() for future in futures]
    for rank, (_, threads) in enumerate(results):
        if threads > MOST_THREADS:
            _kept.pop((pool, rank)).shutdown(wait=False)
    return [result for result, _ in results]


def _process(pool: str, rank: int) -> ProcessPoolExecutor:
    """Kept, and taken for groups of any size, until too many threads of groups that were left ask for messages in it."""
    if (pool, rank) not in _kept:
        settings = {"mp_context": get_context("spawn"), "initializer": _end_with_parent, "initargs": (os.getpid(),)}
        _kept[pool, rank] = ProcessPoolExecutor(1, **settings)
    return _kept[pool, rank]


def _end_with_parent(parent: int) -> None:
    """A test that is killed leaves no ranks behind, which would wait for each other as fast as they can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _as_rank(
    rank: int, place: dict[str, Any], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Any, int]:
    """What the function returns, and how many threads there are then."""
    import torch

    torch.set_num_threads(1)
    names = place | {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in names.items()})
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    try:
        result = function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()
        forget_groups()
    process = psutil.Process()
    if process.num_threads() > MOST_THREADS:
        gc.collect()  # a backend that was closed may lie in a circle, and its groups with it
    return result, process.num_threads()


def forget_groups() -> None:
    """DTensor remembers how it spread what, and with it groups that were left: their threads go on asking for messages.

    A process with a hundred of them leaves little time to others.
    """
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
