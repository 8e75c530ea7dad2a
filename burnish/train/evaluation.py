"""The loss on each evaluation set: an exact mean over its targets, whatever the batches."""

import math
from collections.abc import Iterable, Mapping

from burnish.backends.base import Backend
from burnish.data.batch import Batch


def evaluate(backend: Backend, *, sets: Mapping[str, Iterable[Batch]]) -> dict[str, float]:
    """``eval/{name}/{loss,perplexity,num_targets}`` of each set; each is walked once, from its start."""
    metrics: dict[str, float] = {}
    for name, batches in sets.items():
        losses, num_targets = [], 0
        for batch in batches:
            loss, targets = backend.eval_loss(batch)
            losses.append(loss)
            num_targets += targets
        mean = math.fsum(losses) / num_targets
        metrics[f"eval/{name}/loss"] = mean
        metrics[f"eval/{name}/perplexity"] = math.exp(mean) if mean < 700 else math.inf
        metrics[f"eval/{name}/num_targets"] = num_targets
    return metrics
