"""Where metrics go: the console, and always a JSON-lines file."""

import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol, TextIO

from burnish.log import get_logger

log = get_logger(__name__)

Metrics = Mapping[str, Any]

METRICS_FILE, ANSWERS_FILE = "metrics.jsonl", "answers.jsonl"
_PLAIN_SECONDS = 5.0


class Tracker(Protocol):
    """A place for metrics."""

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Take the metrics of ``step``; called once a step, steps never go back within a run."""
        ...

    def log_answers(self, answers: Sequence[tuple[str, str]], *, step: int) -> None:
        """Take (prompt, answer) of each prompt after ``step``, before the metrics of that step."""
        ...

    def close(self, *, failed: bool) -> None:
        """End the run, which ``failed`` where an exception ended it; a stop that was asked for is none."""
        ...


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker], *, identity: str) -> None:
        self._trackers = list(trackers)
        self._lost = Counter[Tracker]()
        self.identity = identity
        """What services know the run by; kept in its checkpoints."""

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Pass ``metrics`` to each tracker; one that cannot write them (a full disk, a broken pipe) ends nothing."""
        for tracker in self._trackers:
            self._try(tracker, methodcaller("log", metrics, step=step))

    def log_answers(self, answers: Sequence[tuple[str, str]], *, step: int) -> None:
        """Pass ``answers`` to each tracker."""
        for tracker in self._trackers:
            self._try(tracker, methodcaller("log_answers", answers, step=step))

    def close(self, *, failed: bool) -> None:
        """Close all at once: some wait for their service."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda tracker: self._try(tracker, methodcaller("close", failed=failed)), self._trackers))
        for tracker, times in self._lost.items():
            log.warning("%s: %d writes failed, what it wrote is not complete", type(tracker).__name__, times)

    def _try(self, tracker: Tracker, action: Callable[[Tracker], None]) -> None:
        try:
            action(tracker)
        except OSError as error:
            self._lost[tracker] += 1
            if self._lost[tracker] == 1:
                log.warning("%s cannot write (%s); training goes on", type(tracker).__name__, error)


class JsonlTracker:
    """One JSON object a step in ``file``, numbers unrounded; numbers that JSON lacks (infinity, nan) are null.

    Answers to prompts go to ``answers.jsonl`` beside it, one object an answer: ``step``, ``prompt`` and ``answer``.
    A resumed run appends: of a step that stands twice, the last lines count. A fresh one moves old files to
    ``metrics.K.jsonl`` and ``answers.K.jsonl``, with the first K that is free for both.
    """

    def __init__(self, file: Path, *, resumed: bool) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._answers = file.with_name(ANSWERS_FILE)
        if not resumed:
            _move_aside([file, self._answers])
        content = file.read_bytes() if file.exists() else b""
        steps = re.findall(rb'^\{"step": (\d+),.*\}$', content, re.MULTILINE)
        self.last_step = max(map(int, steps), default=-1)
        """The highest step that was there already; -1 where there was none."""
        self._stream = _appending(file)

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Write one line and hand it to the system."""
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        self._stream.write(json.dumps({"step": step, **known}) + "\n")
        self._stream.flush()

    def log_answers(self, answers: Sequence[tuple[str, str]], *, step: int) -> None:
        """Append a line for each."""
        with _appending(self._answers) as stream:
            for prompt, answer in answers:
                stream.write(json.dumps({"step": step, "prompt": prompt, "answer": answer}) + "\n")

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        del failed
        self._stream.close()


def _move_aside(files: Sequence[Path]) -> None:
    """Rename those that exist, all with the first number that is free."""
    k = 1
    while any(file.with_name(f"{file.stem}.{k}{file.suffix}").exists() for file in files):
        k += 1
    for file in files:
        if file.exists():
            file.rename(file.with_name(f"{file.stem}.{k}{file.suffix}"))


def _appending(file: Path) -> TextIO:
    """``file`` at its end; a killed run's last line does not swallow the next one."""
    torn = False
    if file.exists() and file.stat().st_size:
        with file.open("rb") as written:
            written.seek(-1, os.SEEK_END)
            torn = written.read() != b"\n"
    stream: TextIO = file.open("a", encoding="utf-8")
    if torn:
        stream.write("\n")
    return stream


class ConsoleTracker:
    """A progress line with the time left on a terminal; plain lines, not too many, in a log."""

    def __init__(self, stream: TextIO = sys.stderr, *, num_steps: int, first_step: int) -> None:
        self._stream = stream
        self._num_steps = num_steps
        self._first_step = first_step
        self._started = time.monotonic()
        self._last_plain = -math.inf
        self._live = stream.isatty()
        self._open_line = False

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Show the step, and an evaluation on lines of its own."""
        evaluations = {k: v for k, v in metrics.items() if k.startswith("eval/") and k.endswith("/loss")}
        now = time.monotonic()
        if "train/loss" in metrics:
            line = self._line(metrics, step=step, seconds=now - self._started)
            if self._live:
                self._write(f"\r\x1b[K{line}", open_line=True)
            elif evaluations or step in (1, self._num_steps) or now - self._last_plain >= _PLAIN_SECONDS:
                self._write(f"{line}\n", open_line=False)
                self._last_plain = now
        for key, loss in evaluations.items():
            start = "\n" if self._open_line else ""
            self._write(f"{start}step {step}: {key} {loss:.4f}\n", open_line=False)

    def log_answers(self, answers: Sequence[tuple[str, str]], *, step: int) -> None:
        """Show the beginning of each prompt and of its answer, on a line of their own."""
        for prompt, answer in answers:
            start = "\n" if self._open_line else ""
            said = f"step {step}: {_beginning(prompt, longest=40)} -> {_beginning(answer, longest=100)}"
            self._write(f"{start}{said}\n", open_line=False)

    def close(self, *, failed: bool) -> None:
        """End the progress line."""
        del failed
        if self._open_line:
            self._write("\n", open_line=False)

    def _line(self, metrics: Metrics, *, step: int, seconds: float) -> str:
        done = step - self._first_step
        left = seconds / max(1, done) * (self._num_steps - step)
        return (
            f"step {step}/{self._num_steps}  loss {metrics['train/loss']:.4f}  lr {metrics['train/lr']:.3g}  "
            f"grad {metrics['train/grad_norm']:.3g}  {metrics['train/tokens_per_second']:,.0f} tokens/s  "
            f"epoch {metrics['train/epoch']:.2f}  {_clock(left)} left"
        )

    def _write(self, text: str, *, open_line: bool) -> None:
        self._stream.write(text)
        self._stream.flush()
        self._open_line = open_line


def _beginning(text: str, *, longest: int) -> str:
    """Of ``text``, quoted, so that nothing in it moves the cursor or ends the line."""
    return repr(text) if len(text) <= longest else f"{text[:longest]!r}..."


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
