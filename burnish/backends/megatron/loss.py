"""Hidden states become the summed cross-entropy of the targets, where ranks hold a part of the vocabulary each.

The numbers are those of :mod:`burnish.models.loss`, and so is its rule: no logits where there is no target.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from burnish.models.loss import CHUNK_ELEMENTS, CROSS_ENTROPY, Objective


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The rows of the head that this rank holds."""

    first: int
    """Token id of its first row."""
    size: int
    """Tokens of the whole vocabulary; rows from there on are padding."""
    group: dist.ProcessGroup
    """The ranks that hold the others."""

    def sum(self, values: Tensor) -> Tensor:
        """``values`` summed over the ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """The highest of each of ``values`` on any of the ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values


def target_loss(
    hidden: Tensor,
    weight: Tensor,
    *,
    target_ids: Tensor,
    vocabulary: VocabularyPart,
    objective: Objective = CROSS_ENTROPY,
) -> Tensor:
    """[targets] float32: what each costs; equal on all ranks of the vocabulary.

    Args:
        hidden: [targets, width] at positions that predict a target; its gradient is that of this rank's part alone.
        weight: [part of the vocabulary, width] of the head.
        target_ids: [targets] int64
        vocabulary: which part.
        objective: what a target costs.
    """
    job = _Job(target_ids, vocabulary, objective, torch.is_grad_enabled())
    losses: Tensor = _CrossEntropy.apply(hidden, weight, job)  # type: ignore[no-untyped-call]
    return losses


@dataclass(frozen=True, slots=True)
class _Job:
    target_ids: Tensor
    vocabulary: VocabularyPart
    objective: Objective
    with_gradients: bool


class _CrossEntropy(torch.autograd.Function):
    """Makes the gradients of the sum during the forward, chunk by chunk; so all losses must have one outer gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, job: _Job) -> Tensor:
        rows = weight[: max(0, job.vocabulary.size - job.vocabulary.first)]
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        chunk = max(1, CHUNK_ELEMENTS[hidden.device.type] // weight.shape[0])
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            losses[part], d_logits = _losses(linear(hidden[part], rows).float(), job.target_ids[part], job)
            if job.with_gradients:
                d_logits = d_logits.to(weight.dtype)
                torch.mm(d_logits, rows, out=d_hidden[part])
                d_weight[: len(rows)] += d_logits.t() @ hidden[part]
        ctx.gradients = (d_hidden, d_weight)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outer,) = gradients
        d_hidden, d_weight = ctx.gradients
        ctx.gradients = None
        scale = outer[0] if len(outer) else outer.new_zeros(())
        return d_hidden.mul_(scale), d_weight.mul_(scale).to(d_hidden.dtype), None


def _losses(logits: Tensor, ids: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
    """[targets] losses, and their gradient in ``logits`` [targets, part of the vocabulary], which it overwrites.

    With z the logits and lse the log of the softmax denominator: (lse - z_target) (1 - e) + (lse - mean z) e + w lse^2.
    """
    vocabulary, objective = job.vocabulary, job.objective
    smoothing = objective.label_smoothing
    own = (ids - vocabulary.first)[:, None]
    is_own = (own >= 0) & (own < logits.shape[1])
    own = own.clamp(0, logits.shape[1] - 1)
    of_target = torch.where(is_own, logits.gather(1, own), 0.0)[:, 0]
    mean = logits.sum(1) / vocabulary.size
    highest = vocabulary.max(logits.max(1).values)
    p = logits.sub_(highest[:, None]).exp_()
    denominator, of_target, mean = vocabulary.sum(torch.stack([p.sum(1), of_target, mean]))
    lse = denominator.log() + highest
    losses = lse - (1 - smoothing) * of_target - smoothing * mean + objective.z_loss * lse**2
    p *= ((1 + 2 * objective.z_loss * lse) / denominator)[:, None]
    if smoothing:
        p -= smoothing / vocabulary.size
    return losses, p.scatter_add_(1, own, torch.where(is_own, smoothing - 1, 0.0))
