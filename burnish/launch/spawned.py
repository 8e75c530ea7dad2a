"""The process of one rank that this package starts; what it is told stands in the files of :mod:`burnish.launch.order`."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from burnish.config import Purpose, load_config
from burnish.errors import BurnishError
from burnish.launch.order import CONFIG, OUTCOME
from burnish.launch.tasks import TASKS
from burnish.log import configure_logging

_POLL_SECONDS = 1.0


def main() -> NoReturn:
    """The process of one rank. Its order lies where its first argument says; rank 0 leaves the result beside it."""
    file = Path(sys.argv[1])
    order = json.loads(file.read_text(encoding="utf-8"))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    threading.Thread(target=_follow, args=(order["launcher"],), daemon=True).start()
    configure_logging(rank=int(os.environ["RANK"]))
    purpose = Purpose(order["purpose"])
    try:
        outcome = TASKS[purpose](load_config(file.with_name(CONFIG), purpose=purpose))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes too late to change how this ends
    except BurnishError as error:  # the ranks have not met, and so could not agree on who says it
        sys.exit(_said(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if os.environ["RANK"] == "0":
        file.with_name(OUTCOME).write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    sys.exit(outcome.exit_status)


def _said(error: BurnishError) -> int:
    sys.stderr.write(f"{error}\n")
    return 2


def _follow(launcher: int) -> None:
    """Save and end when the process that started this one is gone."""
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
