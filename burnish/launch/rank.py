"""One process as a rank of the run: it joins the others, and of all that fail only the first is heard."""

import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist

from burnish.backends.comm import Ranks, joined
from burnish.errors import BurnishError, LaunchError
from burnish.launch.contact import Contact, in_contact
from burnish.launch.environment import adopt_rank
from burnish.log import configure_logging

_TO_LEARN = 1.0
"""Seconds that an error of a collective waits for the news that another rank is gone."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the ranks of the run."""

    ranks: Ranks
    contact: Contact


@contextmanager
def placed() -> Iterator[Place]:
    """This process as the rank that the environment names; alone without one. All ranks leave it together.

    Raises:
        BurnishError: alone, whatever the block raises.
        SystemExit: as one of several ranks, for any error of the block: it is on stderr already, told by one rank.
        LaunchError: the others cannot be met.
    """
    adopt_rank()
    with _met() as ranks, in_contact(ranks) as contact, _ToldOnce(ranks, contact):
        configure_logging(rank=ranks.rank)
        yield Place(ranks, contact)
        ranks.meet("end")
        ranks.any([True])  # so that the process which holds the store leaves last


class _ToldOnce:
    """Of all ranks that fail, the first says why; the others did not fail, they lost contact."""

    def __init__(self, ranks: Ranks, contact: Contact) -> None:
        self._ranks = ranks
        self._contact = contact

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._ranks.world_size == 1:
            return
        if threading.current_thread() is threading.main_thread():
            # This process ends already; whoever started it may want it to, and a signal must not break what is cleaned up.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not isinstance(error, Exception):
            return
        is_users = isinstance(error, BurnishError)
        within = _TO_LEARN if isinstance(error, RuntimeError) else 0.0
        if self._contact.lost(within=within) is None and self._ranks.is_first_to_fail():
            text = f"{error}\n" if is_users else "".join(traceback.format_exception(error))
            sys.stderr.write(f"rank {self._ranks.rank} on {platform.node()}: {text}")
        elif self._contact.lost() is not None and not is_users:
            self._contact.say_lost()
        sys.stderr.flush()
        raise SystemExit(2 if is_users else 1)


@contextmanager
def _met() -> Iterator[Ranks]:
    """The group of all ranks."""
    with ExitStack() as stack:
        try:
            with _mortal():
                ranks = stack.enter_context(joined())
        except dist.DistError as error:
            raise _unmet(error) from error
        yield ranks


@contextmanager
def _mortal() -> Iterator[None]:
    """Until the ranks have met there is nothing to save, and SIGTERM ends a process though it waits inside torch."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unmet(error: Exception) -> LaunchError:
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    where = f"rank {rank} of {world} on {platform.node()}"
    said = str(error).strip().splitlines()[0]
    if "EADDRINUSE" in str(error):
        fix = "set MASTER_PORT to another port, the same on every process"
        return LaunchError(where, f"MASTER_PORT={os.environ.get('MASTER_PORT')} is in use on this machine", fix=fix)
    fix = (
        "look whether all ranks have started (in a SLURM script, with srun), and whether MASTER_ADDR and MASTER_PORT name"
        " a host of rank 0 that this one reaches"
    )
    return LaunchError(where, f"has not met the others at {address} ({said})", fix=fix)
