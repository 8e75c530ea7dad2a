"""The signals that ask a run to stop."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def heeded(note: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, call ``note`` with every SIGTERM and SIGINT, which then do nothing else.

    What is set for one of them meanwhile stays.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python gives signals to the main thread alone.
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        note(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)
