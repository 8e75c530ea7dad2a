"""A callback that makes one rank fail."""

import os
import signal
import time
from pathlib import Path

from burnish.errors import DataError
from burnish.train.callbacks import Callback


class Failing(Callback):
    """On a rank, before step 3: raises, is wrong by the user's fault, is killed, or hangs. Notes when in ``failed``."""

    def __init__(self, how: str, *, rank: int = 1) -> None:
        self._how = how
        self._rank = str(rank)

    def on_step_begin(self, progress, requests):
        if progress.step != 2 or os.environ.get("RANK", "0") != self._rank:
            return
        Path("failed").write_text(str(time.time()))
        match self._how:
            case "raise":
                raise ValueError("planted")
            case "user":
                raise DataError("here", "is planted", fix="leave it out")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(600)


class Stuck(Callback):
    """Before step 3 the second rank is killed, and the first hangs where no signal wakes it, as in a collective."""

    def on_step_begin(self, progress, requests):
        if progress.step != 2:
            return
        if os.environ["RANK"] == "1":
            Path("failed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        time.sleep(600)
