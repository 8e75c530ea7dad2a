"""Numbers of a step, under the names that trackers and reports know."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.backends.base import StepResult
from burnish.data.batch import IGNORE, Batch
from burnish.train.progress import Progress


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What is known of a run before its first step, and turns results into metrics."""

    source_names: Sequence[str]
    """Name of each source; losses are split by source when there are several."""
    draws_per_epoch: int
    """Rows an epoch draws."""
    num_ranks: int
    data_size: int
    """Parts that a batch is dealt out in; ranks beyond that number compute one together."""
    flops_of: Callable[..., float]
    """(lengths of segments, patches of images, number of targets) -> floating-point operations, forward and backward."""
    peak_flops: float | None
    """What one device could do in a second; ``None`` where it is not known (a CPU)."""

    def of(
        self, progress: Progress, *, batch: Batch, result: StepResult, timings: Mapping[str, float]
    ) -> dict[str, Any]:
        """Metrics of a step; ``timings["step"]`` is its wall time in seconds. ``None`` is a number not known."""
        seconds = timings["step"]
        tokens_per_second = batch.num_tokens / seconds
        return {
            "train/loss": result.loss,
            **self._by_source(result),
            "train/grad_norm": result.grad_norm,
            "train/lr": result.learning_rate,
            "train/skipped": int(result.skipped),
            "train/num_tokens": batch.num_tokens,
            "train/num_targets": batch.num_targets,
            "train/tokens_per_second": tokens_per_second,
            "train/tokens_per_second_per_gpu": tokens_per_second / self.num_ranks,
            "train/mfu": self._mfu(batch, seconds),
            "train/packing_efficiency": _packing_efficiency(batch),
            "train/epoch": batch.cursor["epoch"] + batch.cursor["position"] / self.draws_per_epoch,
            "train/total_tokens": progress.total_tokens,
            "train/memory_peak_gib": result.memory_peak_gib,
            **{f"timing/{part}": value for part, value in {**timings, **result.timings}.items()},
        }

    def _mfu(self, batch: Batch, seconds: float) -> float | None:
        """Model FLOPs utilisation: what this rank's rows need, by what the devices that share them could do meanwhile."""
        if self.peak_flops is None:
            return None
        num_targets = sum(int((micro_batch.labels != IGNORE).sum()) for micro_batch in batch.micro_batches)
        possible = seconds * self.peak_flops * (self.num_ranks / self.data_size)
        lengths, patches = _segment_lengths(batch), _image_patches(batch)
        return self.flops_of(lengths=lengths, patches=patches, num_targets=num_targets) / possible

    def _by_source(self, result: StepResult) -> dict[str, float]:
        if len(self.source_names) < 2:
            return {}
        sums = zip(self.source_names, result.loss_sums, result.num_targets, strict=True)
        return {f"train/loss/{name}": loss / targets for name, loss, targets in sums if targets}


def short_names(names: Sequence[str]) -> list[str]:
    """The last part of each name; where two are alike, all after their numbers."""
    short = [name.rstrip("/").rsplit("/", 1)[-1] for name in names]
    return short if len(set(short)) == len(short) else [f"{number}.{name}" for number, name in enumerate(short)]


def _segment_lengths(batch: Batch) -> list[int]:
    rows = (row for micro_batch in batch.micro_batches for row in micro_batch.segment_ids)
    return [int(length) for row in rows for length in np.bincount(row)[1:]]


def _image_patches(batch: Batch) -> list[int]:
    images = (images for micro_batch in batch.micro_batches for images in micro_batch.images)
    return [int(patches) for one in images for patches in one.grid_thw.prod(1)]


def _packing_efficiency(batch: Batch) -> float:
    cells = sum(micro_batch.segment_ids.size for micro_batch in batch.micro_batches)
    return sum(int((micro_batch.segment_ids > 0).sum()) for micro_batch in batch.micro_batches) / cells
