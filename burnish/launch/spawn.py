"""A run as several processes of this machine, started and watched by torchrun's own engine.

The rule: the ranks are given all the time they need to save, ``shutdown_grace_seconds``, and none is left behind.
"""

import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from burnish.config import Purpose, SFTConfig
from burnish.launch.order import OUTCOME, write_order
from burnish.launch.signals import heeded
from burnish.launch.tasks import Outcome
from burnish.log import get_logger

log = get_logger(__name__)

_POLL_SECONDS = 0.1
_AT_ONCE = 5.0
"""Seconds after a second Ctrl-C."""
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def spawn(config: SFTConfig, *, purpose: Purpose, world_size: int) -> Outcome:
    """What ``config`` says, by ``world_size`` new processes.

    Raises:
        SystemExit: a rank failed. The reason is on stderr already; 2 when the user can mend it, else 1.
    """
    with TemporaryDirectory(prefix="burnish-launch-") as folder:
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _num_cores() // world_size)))}
        arguments = write_order(Path(folder), config, purpose=purpose, environment=environment)
        with _quiet("torch.distributed.elastic"):
            agent = _agent(arguments, world_size=world_size, log_folder=Path(folder) / "logs")
            watch = _Watch(agent, grace_seconds=config.shutdown_grace_seconds)
            failures = watch.run().failures
        file = Path(folder) / OUTCOME
        outcome = Outcome(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None
    status = outcome.exit_status if outcome else 0
    if failures:
        status = 128 + watch.signal if watch.signal else status or _blame(failures)
    if outcome is None or status not in (0, *_INTERRUPTED):
        raise SystemExit(status)
    return Outcome(outcome.result, status)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _agent(arguments: tuple[str, ...], *, world_size: int, log_folder: Path) -> LocalElasticAgent:
    """What starts a Python with ``arguments`` for each rank, on a free port; none is started twice."""
    place = RendezvousParameters("c10d", "127.0.0.1:0", uuid.uuid4().hex, 1, 1, local_addr="127.0.0.1", is_host=True)
    spec = WorkerSpec(
        role="burnish",
        local_world_size=world_size,
        rdzv_handler=get_rendezvous_handler(place),
        entrypoint=sys.executable,
        args=arguments,
        max_restarts=0,
        monitor_interval=_POLL_SECONDS,
        local_addr="127.0.0.1",
    )
    return LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(log_dir=str(log_folder)))


class _Watch:
    """Runs an agent in a thread; signals that come meanwhile are passed on to the ranks."""

    def __init__(self, agent: LocalElasticAgent, *, grace_seconds: float) -> None:
        self._agent = agent
        self._grace_seconds = grace_seconds
        self._signals: list[int] = []
        self._deadline = float("inf")

    @property
    def signal(self) -> int:
        """The first signal that this process got; 0 without one."""
        return self._signals[0] if self._signals else 0

    def run(self) -> RunResult:
        """Return when every rank has ended."""
        with ThreadPoolExecutor(1) as thread, heeded(self._signals.append):
            running: Future[RunResult] = thread.submit(self._agent.run)
            try:
                self._follow(running)
            finally:
                if not running.done():
                    self._send(signal.SIGKILL)
            return running.result()

    def _follow(self, running: Future[RunResult]) -> None:
        num_sent = 0
        while not wait([running], timeout=_POLL_SECONDS).done:
            if len(self._signals) > num_sent and self._pids():
                # The terminal may have given the ranks their SIGINT already, and a second one would end them at once.
                is_second = num_sent > 0 and self._signals[-1] == signal.SIGINT
                if num_sent == 0 or is_second:
                    self._send(signal.SIGINT if is_second else signal.SIGTERM)
                    self._deadline = time.monotonic() + (_AT_ONCE if is_second else self._grace_seconds)
                num_sent = len(self._signals)
            if time.monotonic() > self._deadline:
                log.error("not saved within %g seconds: the ranks are killed", self._grace_seconds)
                self._send(signal.SIGKILL)
                self._deadline = float("inf")

    def _pids(self) -> list[int]:
        return [worker.id for worker in self._agent.get_worker_group().workers if isinstance(worker.id, int)]

    def _send(self, number: int) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _blame(failures: Mapping[int, ProcessFailure]) -> int:
    """The exit status for ``failures``; says who was first where that one could not."""
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    for rank, code in codes.items():
        # The engine ends the others by SIGTERM.
        if code < 0 and code != -signal.SIGTERM:
            hint = "; out of memory?" if code == -signal.SIGKILL else ""
            log.error("rank %d was killed by %s%s", rank, signal.Signals(-code).name, hint)
            return 1
    first = next(iter(codes.values()))
    if 2 in codes.values():
        return 2
    return first if first in _INTERRUPTED else 1


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """What the logger ``name`` and those below it say goes nowhere: it repeats what the ranks have said."""
    logger, silence = logging.getLogger(name), logging.NullHandler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(silence)
    try:
        yield
    finally:
        logger.removeHandler(silence)
        logger.propagate = propagate
