"""One job at a time on a thread of each rank, beside the training. How it ended, all ranks learn at the same step."""

from collections.abc import Callable
from threading import Thread

from burnish.backends.comm import Ranks
from burnish.errors import BurnishError
from burnish.log import get_logger

log = get_logger(__name__)

_POLL_SECONDS = 0.1


class Behind:
    """The methods but ``leave`` are called on all ranks at the same time."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._job: _Job | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin ``work``, once the one before has ended."""
        self.finish()
        self._job = _Job(work)
        self._job.start()

    def poll(self) -> bool:
        """Whether no rank is at work, without waiting.

        Raises:
            BurnishError: that of the first rank whose work failed, on every rank.
        """
        if self._job is None:
            return True
        if self._ranks.any([self._job.is_alive()])[0]:
            return False
        job, self._job = self._job, None
        self._ranks.of_each(job.result)
        return True

    def finish(self) -> None:
        """Wait until no rank is at work; not in a collective, as that may take hours."""
        while self._job and not self.poll():
            self._job.join(_POLL_SECONDS)

    def leave(self) -> None:
        """Wait for this rank's own work, as the others may be gone; what went wrong is only said."""
        job, self._job = self._job, None
        if job:
            job.join()
            try:
                job.result()
            except BurnishError as error:
                log.error("%s", error)


class _Job(Thread):
    def __init__(self, work: Callable[[], None]) -> None:
        # A user who interrupts twice does not wait for it.
        super().__init__(name="behind", daemon=True)
        self._work = work
        self._error: BurnishError | None = BurnishError("saving", "ended without a result: see the traceback above")

    def run(self) -> None:
        try:
            self._work()
            self._error = None
        except BurnishError as error:
            self._error = error

    def result(self) -> None:
        if self._error:
            raise self._error
