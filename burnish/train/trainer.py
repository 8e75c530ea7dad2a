"""The training loop. Read :meth:`Trainer.train` first: all that a run does is called from there."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Any

from burnish.backends.base import Backend, StepResult
from burnish.backends.comm import Ranks
from burnish.data.batch import Batch
from burnish.data.stream import BatchStream
from burnish.errors import DataError
from burnish.log import get_logger
from burnish.train.cadence import Cadence
from burnish.train.callbacks import Callback, Callbacks
from burnish.train.checkpoint import Checkpointer
from burnish.train.evaluation import evaluate
from burnish.train.export import Exporter
from burnish.train.generation import Questions
from burnish.train.metrics import StepMetrics
from burnish.train.profiling import Profiler
from burnish.train.progress import Progress
from burnish.train.trackers import Trackers

log = get_logger(__name__)

_FULL_COLLECTION = 50
"""Steps between collections of what has outlived others."""


class Trainer:
    """Runs ``backend`` over ``stream`` up to step ``num_steps``; evaluates, saves and logs when due."""

    def __init__(
        self,
        *,
        ranks: Ranks,
        backend: Backend,
        stream: BatchStream,
        num_steps: int,
        eval_sets: Mapping[str, Iterable[Batch]],
        eval_at: Cadence,
        eval_first: bool,
        questions: Questions | None,
        checkpointer: Checkpointer,
        save_at: Cadence,
        exporter: Exporter | None,
        profiler: Profiler,
        metrics: StepMetrics,
        trackers: Trackers,
        callbacks: Callbacks,
        max_bad_steps: int,
        progress: Progress,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ranks = ranks
        self._backend = backend
        self._stream = stream
        self.num_steps = num_steps
        self._eval_sets = eval_sets
        self._eval_at = eval_at
        self._eval_first = eval_first
        self._questions = questions
        self._checkpointer = checkpointer
        self._save_at = save_at
        self._exporter = exporter
        self._profiler = profiler
        self._metrics = metrics
        self.trackers = trackers
        self._callbacks = callbacks
        self._max_bad_steps = max_bad_steps
        self._interrupted = interrupted
        self._trained: Batch | None = None
        self._saved_step = 0
        self.progress = progress

    def train(self) -> Progress:
        """Train to the end, or until a callback or a signal asks to stop; the last step is saved."""
        with self._checkpointer, self._profiler, _collecting_between_steps():
            self._callbacks.call(Callback.on_train_begin, self.progress)
            if self._eval_first and self.progress.step == 0 and (baseline := self._evaluate(last=False)):
                self.trackers.log(baseline, step=0)
            epoch_begins = True
            for batch, data_wait in _timed(islice(self._stream, max(0, self.num_steps - self.progress.step))):
                if self._called_off(batch):
                    break
                if epoch_begins:
                    self._callbacks.call(Callback.on_epoch_begin, self.progress)
                if self._step(batch, data_wait=data_wait):
                    break
                epoch_begins = batch.ends_epoch
                gc.collect(1 if self.progress.step % _FULL_COLLECTION else 2)
            self._callbacks.call(Callback.on_train_end, self.progress)
        return self.progress

    def _step(self, batch: Batch, *, data_wait: float) -> bool:
        """One optimizer step, and all that is due after it. Returns whether it was the last."""
        started = time.perf_counter()
        self._callbacks.call(Callback.on_step_begin, self.progress)
        result = self._backend.train_step(batch)
        self._advance(batch, result)
        timings = {"step": data_wait + time.perf_counter() - started, "data_wait": data_wait}
        self._callbacks.call(Callback.on_step_end, self.progress, batch=batch, result=result)
        if batch.ends_epoch:
            self._callbacks.call(Callback.on_epoch_end, self.progress)

        requests, step = self._callbacks.requests, self.progress.step
        gave_up = self.progress.bad_steps >= self._max_bad_steps
        self._agree()
        last = requests.stop or gave_up or step == self.num_steps
        evaluation: dict[str, float] = {}
        if requests.evaluate or self._eval_at.due(step, last=last and not gave_up):
            requests.evaluate = False
            self.progress.evaluations += 1
            timings["eval"] = self._clock(lambda: evaluation.update(self._evaluate(last=last)))
        # After the evaluation: a callback may stop at its loss, or save the best, and is saved with what it saw.
        last = last or requests.stop
        if requests.save or self._save_at.due(step, last=last):
            requests.save = False
            timings["checkpoint"] = self._clock(lambda: self._save(batch))
        metrics = self._metrics.of(self.progress, batch=batch, result=result, timings=timings) | evaluation
        self.trackers.log(metrics, step=step)
        self._callbacks.call(Callback.on_log, self.progress, metrics=metrics)
        self._profiler.step(timings)
        # Only then may the checkpoint become complete: a run that is resumed from it does not export this step again.
        self._export(last=last and not gave_up)
        self._checkpointer.poll()
        if gave_up:
            self._give_up()
        return last

    def _called_off(self, batch: Batch) -> bool:
        """Whether any rank is interrupted before ``batch``; then what is done is saved. One message for all ranks."""
        same_rows, interrupted = self._ranks.agree(repr(batch.row_numbers), flag=self._interrupted())
        if not same_rows:
            raise DataError(
                f"sampler, step {batch.step}",
                "drew other rows on one rank than on another",
                fix="draw from its arguments and a fixed seed alone",
            )
        if interrupted and self._trained and self._saved_step != self.progress.step:
            self._save(self._trained)
        return interrupted

    def _agree(self) -> None:
        """What a callback asks on one rank, it asks on all."""
        asked = self._callbacks.requests
        if len(self._callbacks):
            asked.save, asked.evaluate, asked.stop = self._ranks.any((asked.save, asked.evaluate, asked.stop))

    def _advance(self, batch: Batch, result: StepResult) -> None:
        self._trained = batch
        self.progress.step += 1
        self.progress.total_tokens += batch.num_tokens
        self.progress.epoch += batch.ends_epoch
        self.progress.bad_steps = self.progress.bad_steps + 1 if result.skipped else 0
        if result.skipped:
            log.warning(
                "step %d skipped: loss %s, gradient norm %s, on rows %s (look: burnish inspect step %d)",
                self.progress.step,
                result.loss,
                result.grad_norm,
                ", ".join(map(str, batch.row_numbers)),
                self.progress.step,
            )

    def _evaluate(self, *, last: bool) -> dict[str, float]:
        metrics = evaluate(self._backend, sets=self._eval_sets)
        if metrics:
            self._callbacks.call(Callback.on_evaluate, self.progress, metrics=metrics)
            self._agree()
        last = last or self._callbacks.requests.stop
        if self._questions and self._questions.at.due(self.progress.evaluations, last=last):
            self.trackers.log_answers(self._questions.answers(self._backend), step=self.progress.step)
        return metrics

    def _save(self, batch: Batch) -> None:
        if not self._checkpointer.enabled:
            return
        state: dict[str, Any] = {
            "progress": asdict(self.progress),
            "num_steps": self.num_steps,
            "cursor": batch.cursor,
            "callbacks": self._callbacks.state_dicts(),
            "trackers": self.trackers.identity,
        }
        self._saved_step = self.progress.step
        folder = self._checkpointer.save(self._backend, step=self.progress.step, state=state)
        self._callbacks.call(Callback.on_save, self.progress, folder=folder)

    def _export(self, *, last: bool) -> None:
        if self._exporter and self._exporter.cadence.due(self.progress.step, last=last):
            self._exporter.export(self._backend, step=self.progress.step)

    def _give_up(self) -> None:
        raise DataError(
            f"step {self.progress.step}",
            f"loss or gradient was not finite in {self.progress.bad_steps} steps in a row; their updates were skipped",
            fix="lower optimizer_config.lr, look at the rows that the warnings name, or raise max_bad_steps",
        )

    @staticmethod
    def _clock(action: Callable[[], None]) -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started


@contextmanager
def _collecting_between_steps() -> Iterator[None]:
    """Garbage is collected when the loop says so, and what stands before the first step is not looked at again.

    Ranks wait for each other: a collection of one in the middle of a step would hold up all.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _timed(batches: Iterator[Batch]) -> Iterator[tuple[Batch, float]]:
    """Each batch with the seconds it was waited for."""
    started = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - started
        started = time.perf_counter()
