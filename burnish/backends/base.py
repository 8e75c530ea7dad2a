"""Backend: what the trainer needs of a way to spread a model over devices. Seven verbs, no more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from burnish.data.batch import Batch
from burnish.data.packing import Layout


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step gave; the numbers are those of the whole batch and equal on all ranks."""

    loss_sums: tuple[float, ...]
    """Summed cross-entropy of the targets of each source."""
    num_targets: tuple[int, ...]
    """Targets of each source."""
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    """The rate this step was taken with."""
    skipped: bool
    """Whether loss or gradient was not finite, so that no weight was changed."""
    timings: Mapping[str, float]
    """Seconds of each part: ``forward_backward``, ``optimizer``."""
    memory_peak_gib: float
    """Most memory held so far: of the device, or of the process on a CPU."""

    @property
    def loss(self) -> float:
        """Mean over the targets of the whole batch."""
        return sum(self.loss_sums) / max(1, sum(self.num_targets))


class PendingSave(Protocol):
    """A save that is being written while training goes on."""

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        ...

    def wait(self) -> None:
        """Return when every byte of every rank is on disk; raise what went wrong."""
        ...


class Backend(Protocol):
    """Each rank holds one and calls it with its own part of the same batch, in the same order."""

    @property
    def layout(self) -> Layout:
        """Known before the first batch: the stream plans with it."""
        ...

    @property
    def save_bytes(self) -> int:
        """What this rank's part of a save takes on a disk."""
        ...

    def train_step(self, batch: Batch) -> StepResult:
        """Forward, backward and one update of the weights, at the learning rate of ``batch.step``."""
        ...

    def eval_loss(self, batch: Batch) -> tuple[float, int]:
        """(summed loss, targets) of the whole batch, equal on all ranks. Changes nothing."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        """The greedy continuation of each prompt, token ids without the prompt."""
        ...

    def save(self, folder: Path) -> PendingSave:
        """Begin to write weights and optimizer state into ``folder``; returns once they are off the device."""
        ...

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Read what ``save`` wrote, also when the number of ranks has changed."""
        ...

    def export(self, folder: Path) -> None:
        """Write the weights and the model's config as a Hugging Face folder; rank 0 writes."""
        ...

    def close(self) -> None:
        """End what only the backend used; the group is left by whoever joined it."""
        ...
