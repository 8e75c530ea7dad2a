"""Functions run as several ranks of one gloo group, in processes that are kept for the tests that follow."""

import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any


def on_ranks(number: int, function: Callable[..., Any], *arguments: Any, pool: str = "") -> list[Any]:
    """What ``function(*arguments)`` returns on each of ``number`` ranks; its ``joined()`` is their group.

    The function is found by its name: it stands at the top of a module. It joins once: ranks that join again may meet the
    store of the group that another has not left yet. The first error of a rank is raised. What changes a process for
    good is run in a ``pool`` of its own.
    """
    port = _free_port()
    futures = [_process(pool, rank).submit(_as_rank, rank, number, port, function, arguments) for rank in range(number)]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


@cache
def _process(pool: str, rank: int) -> ProcessPoolExecutor:
    """Kept, and taken for groups of any size."""
    del pool, rank
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _as_rank(rank: int, number: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch

    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    return function(*arguments)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
