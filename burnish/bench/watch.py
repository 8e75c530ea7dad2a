"""A run is watched from inside: the clock over the measured steps, and memory from its first step on."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from burnish.train.callbacks import Callback, Requests
from burnish.train.progress import Progress

_GIB = 2**30
_PROCESS = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Measured:
    """What one side of a comparison took for its measured steps."""

    steps: int
    tokens: int
    """Trained on in these, padding not counted."""
    seconds: float
    cpu_seconds: float
    """Of all threads of the process: on a busy machine these can be compared, the seconds on the clock hardly."""
    mfu: float | None
    """Share of the device's peak; None where that is not known."""
    data_wait: float | None
    """Share of the time that the step waited for its rows; None where the trainer does not tell."""
    loss: float
    """Of the last step."""
    memory_peak_gib: float
    """Most memory held from the first step on: of the device, or of the process on a CPU."""
    memory_above_start_gib: float
    """The same, less what was held before the first step."""

    @property
    def tokens_per_second(self) -> float:
        """Over the measured steps."""
        return self.tokens / self.seconds

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> "Measured":
        """What :meth:`write` wrote."""
        return cls(**json.loads(file.read_text()))


class Memory:
    """How much is held from here on."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated() / _GIB
        else:
            (_PROCESS / "clear_refs").write_text("5")  # the peak begins anew (Linux, proc(5))
            self._start = _resident("VmRSS")

    def gib(self) -> tuple[float, float]:
        """(the peak, the peak above the start)."""
        peak = torch.cuda.max_memory_allocated() / _GIB if self._on_gpu else _resident("VmHWM")
        return peak, peak - self._start


class Watch(Callback):
    """Writes a :class:`Measured` of the run to ``out``; its first ``warmup`` steps do not count."""

    def __init__(self, out: str, warmup: int) -> None:
        self._out = Path(out)
        self._warmup = warmup
        self._ends: list[tuple[float, float]] = []
        self._steps: list[Mapping[str, Any]] = []
        self._memory: Memory | None = None

    def on_train_begin(self, progress: Progress, requests: Requests) -> None:
        """Note the memory."""
        self._memory = Memory()

    def on_log(self, progress: Progress, requests: Requests, *, metrics: Mapping[str, Any]) -> None:
        """Note the step."""
        if progress.step >= self._warmup:
            self._ends.append(clocks())
            self._steps.append(metrics)

    def on_train_end(self, progress: Progress, requests: Requests) -> None:
        """Write what was seen."""
        assert self._memory is not None
        steps, (seconds, cpu_seconds) = self._steps[1:], np.subtract(self._ends[-1], self._ends[0]).tolist()
        used = [step["train/mfu"] and step["train/mfu"] * step["timing/step"] for step in steps]
        peak, above = self._memory.gib()
        Measured(
            steps=len(steps),
            tokens=sum(step["train/num_tokens"] for step in steps),
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            mfu=None if None in used else sum(used) / seconds,
            data_wait=sum(step["timing/data_wait"] for step in steps) / seconds,
            loss=steps[-1]["train/loss"],
            memory_peak_gib=peak,
            memory_above_start_gib=above,
        ).write(self._out)


def clocks() -> tuple[float, float]:
    """Seconds of the clock, and of the process."""
    return time.perf_counter(), time.process_time()


def _resident(name: str) -> float:
    (line,) = (line for line in (_PROCESS / "status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 2**20
