"""Some steps are recorded by torch's profiler, and what was allocated on a GPU; both only where asked for."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from burnish.backends.comm import Ranks, claim
from burnish.log import get_logger

log = get_logger(__name__)

_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
_SHOWN = 5
_HISTORY = 1_000_000
"""Allocations remembered, the newest: some hundred steps, and some hundred MiB on disk."""


@dataclass(frozen=True, slots=True)
class Window:
    """Which steps are recorded."""

    skip_first: int = 0
    wait: int = 1
    warmup: int = 1
    active: int = 3
    repeat: int = 1

    @property
    def first_step(self) -> int:
        """The first that a trace holds; 1 is the first after the start, or after a resume."""
        return self.skip_first + self.wait + self.warmup + 1


class Profiler:
    """Records the steps of ``window`` on this rank; enter it before the first step. Without a window it does nothing.

    Args:
        window: which steps.
        folder: of the traces.
        rank: of this process, for their names.
        activities: ``cpu`` and ``cuda``, the second only where there is a GPU.
        export_type: ``chrome_trace`` or ``stacks``.
        kept: what is recorded of an operation, such as ``record_shapes``; arguments of ``torch.profiler.profile``.
    """

    def __init__(
        self,
        window: Window | None = None,
        *,
        folder: Path = Path(),
        rank: int = 0,
        activities: tuple[str, ...] = ("cpu",),
        export_type: str = "chrome_trace",
        **kept: Any,
    ) -> None:
        self._window, self._folder, self._rank, self._export_type = window, folder, rank, export_type
        self._on_gpu = "cuda" in activities and torch.cuda.is_available()
        self._seconds, self._waited = 0.0, 0.0
        self._num_traces = 0
        self._profile: Any = None
        if window:
            self._profile = profile(
                activities=[_ACTIVITIES[name] for name in activities if name != "cuda" or self._on_gpu],
                schedule=schedule(
                    skip_first=window.skip_first,
                    wait=window.wait,
                    warmup=window.warmup,
                    active=window.active,
                    repeat=window.repeat,
                ),
                on_trace_ready=self._write,
                **kept,
            )

    def __enter__(self) -> "Profiler":
        if self._profile:
            self._profile.start()
        return self

    def step(self, timings: Mapping[str, float]) -> None:
        """A step is over; of its ``timings`` in seconds, ``step`` and ``data_wait`` are read."""
        if not self._profile:
            return
        if self._profile.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
            self._seconds += timings["step"]
            self._waited += timings["data_wait"]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
            self._profile.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._profile:
            return
        self._profile.stop()
        if self._window and not self._num_traces:
            log.warning(
                "no step was profiled: the first would have been step %d from the start of this process",
                self._window.first_step,
            )

    def _write(self, recorded: Any) -> None:
        """Called by torch at the end of each window; a run may end where one begins."""
        if not self._seconds:
            return
        self._num_traces += 1
        try:
            log.info("%s: %s", self._export(recorded), self._summary(recorded.key_averages()))
        except (OSError, RuntimeError) as error:  # the run is worth more than its trace
            log.warning("no trace was written to %s: %s", self._folder, error)
        self._seconds, self._waited = 0.0, 0.0

    def _export(self, recorded: Any) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"rank_{self._rank}_window_{self._num_traces}"
        if self._export_type == "stacks":
            file = self._folder / f"{stem}.stacks.txt"
            recorded.export_stacks(str(file), "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total")
        else:
            file = self._folder / f"{stem}.pt.trace.json.gz"
            recorded.export_chrome_trace(str(file))
        return file

    def _summary(self, averages: Any) -> str:
        """The operations with the most time of their own, and the share of the time that data was waited for."""
        device = "CUDA" if self._on_gpu else "CPU"
        # Annotations, such as the profiler's own of steps, hold all that is in none of the operations.
        own = sorted(
            (
                (e.self_device_time_total if self._on_gpu else e.self_cpu_time_total, e.key)
                for e in averages
                if e.device_type.name == device and not e.is_user_annotation
            ),
            reverse=True,
        )
        total = sum(time for time, _ in own) or 1
        most = ", ".join(f"{name:.60} {time / total:.1%}" for time, name in own[:_SHOWN])
        kind = "kernels" if self._on_gpu else "operations"
        return f"{kind} by time: {most}; data wait {self._waited / self._seconds:.1%}"


@contextmanager
def recorded_memory(folder: Path, *, ranks: Ranks) -> Iterator[None]:
    """What is allocated on this process's GPU meanwhile goes into a file in ``folder``, at the end or on an error.

    It is a pickle of torch's own for https://pytorch.org/memory_viz, and never read here.
    """
    file = folder / f"memory_rank_{ranks.rank}.pickle"
    claim(ranks.device)  # recording starts the allocator, which reads its settings then
    torch.cuda.memory._record_memory_history(max_entries=_HISTORY)
    try:
        yield
    finally:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
            log.info("memory: %s", file)
        except (OSError, RuntimeError) as error:  # the run, or its own error, is worth more
            log.warning("no history of memory was written to %s: %s", file, error)
        torch.cuda.memory._record_memory_history(enabled=None)
