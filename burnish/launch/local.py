"""A run in this process. SIGTERM or SIGINT ends it after the step at hand, saved; a SIGINT after that at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from burnish.assemble.run import build_run
from burnish.backends.comm import joined
from burnish.config import SFTConfig
from burnish.log import get_logger
from burnish.train.progress import Progress

log = get_logger(__name__)


@dataclass(slots=True)
class StopSignal:
    """The signal that asked to stop, if one did."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    progress: Progress
    exit_status: int
    """0 done; 128 + the signal's number when a signal ended it before its last step."""


def run(config: SFTConfig) -> Outcome:
    """Train what ``config`` says, to its end or to a signal."""
    stop = StopSignal()
    with (
        joined() as ranks,
        build_run(config, ranks=ranks, interrupted=lambda: stop.number != 0) as trainer,
        _heeded(stop),
    ):
        progress = trainer.train()
    unfinished = stop.number and progress.step < trainer.num_steps
    if unfinished:
        log.info("stopped by %s after step %d", signal.Signals(stop.number).name, progress.step)
    return Outcome(progress, 128 + stop.number if unfinished else 0)


@contextmanager
def _heeded(stop: StopSignal) -> Iterator[None]:
    """Note the first signal in ``stop``. Schedulers repeat SIGTERM, so only a SIGINT after it ends the run at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python gives signals to the main thread alone.
        return

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if stop.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not stop.number:
            stop.number = number
            # Not through the log: the signal may have come while it was writing.
            os.write(2, b"stopping: the step is finished and saved first; Ctrl-C (again) ends at once\n")

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
