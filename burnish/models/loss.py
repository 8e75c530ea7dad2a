"""Hidden states become the summed cross-entropy of the targets. Its rule: no logits where there is no target.

One way for all devices. ``torch.nn.functional.linear_cross_entropy`` is no faster here and in bfloat16 off by percents;
the fused kernels of others sum weight gradients in low precision, or give no sums by source.
:class:`LossModel` puts the loss inside the model's forward, because FSDP holds the head's weight whole only there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from burnish.models.attention import Segments
from burnish.models.balance import balancing_loss
from burnish.models.load import takes_images
from burnish.models.vision import VisionCard, no_image, nothing_of

Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**27}
"""Logits that exist at one time: 64 MiB in float32 on a CPU, which is as fast as more; a GPU wants wider products."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a model does to its logits after the matrix product."""

    scale: float = 1.0
    """Factor."""
    softcap: float | None = None
    """Bounds them: ``softcap * tanh(logits / softcap)``."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Head":
        """Read from a text model's config: Gemma 2 and 3 cap, Cohere multiplies, Granite divides."""
        scale = float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)
        return cls(scale, config.get("final_logit_softcapping"))

    def apply(self, logits: Tensor) -> Tensor:
        """``logits`` as the model gives them, in float32."""
        logits = logits.float()
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def backward(self, d_logits: Tensor, logits: Tensor) -> Tensor:
        """The gradient before :meth:`apply`, from that of its result ``logits``; overwrites ``d_logits``."""
        if self.softcap is not None:
            d_logits *= 1 - (logits / self.softcap) ** 2
        return d_logits if self.scale == 1 else d_logits.mul_(self.scale)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a target costs beyond its cross-entropy; formulas in docs/packing.md."""

    label_smoothing: float = 0.0
    """Share of a target that is spread evenly over the vocabulary (Szegedy et al. 2016, section 7)."""
    z_loss: float = 0.0
    """Weight of the squared log of the softmax denominator (Chowdhery et al. 2022, section 5)."""
    router_aux_loss_coef: float = 0.0
    """Weight of the loss that keeps experts equally busy; not of a target, but of each token of a micro-batch."""

    def losses(self, log_p: Tensor, *, ids: Tensor, lse: Tensor) -> Tensor:
        """[targets, 1] float32.

        Args:
            log_p: [targets, vocabulary] float32 logarithms of the probabilities.
            ids: [targets, 1] the targets.
            lse: [targets, 1] float32 log of the softmax denominators.
        """
        losses = -log_p.gather(1, ids)
        if self.label_smoothing:
            losses = losses.lerp(-log_p.mean(-1, keepdim=True), self.label_smoothing)
        return losses + self.z_loss * lse**2 if self.z_loss else losses

    def backward(self, p: Tensor, *, ids: Tensor, lse: Tensor) -> Tensor:
        """[targets, vocabulary]: their gradient in the logits, from the probabilities ``p``, which it overwrites."""
        if self.z_loss:
            p *= 1 + 2 * self.z_loss * lse
        if self.label_smoothing:
            p -= self.label_smoothing / p.shape[1]
        return p.scatter_add_(1, ids, torch.full_like(lse, self.label_smoothing - 1))


CROSS_ENTROPY = Objective()


def segment_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    target_ids: Tensor,
    target_sources: Tensor,
    num_sources: int,
    head: Head,
    objective: Objective = CROSS_ENTROPY,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the targets, or what ``objective`` makes of it.

    Args:
        hidden: [targets, width] the last hidden states at positions that predict a target, and only these.
        weight: [vocabulary, width] of the head.
        bias: [vocabulary] of the head, if it has one.
        target_ids: [targets] int64 token to predict.
        target_sources: [targets] int64 number of the source of each.
        num_sources: how many there are.
        head: what follows the matrix product.
        objective: what a target costs.

    Returns:
        The sum as a float32 scalar to go backward from, and the sums by source [num_sources] float32, without a graph.
        Without targets both are 0; going backward then gives zero gradients.
    """
    job = _Job(target_ids, target_sources, num_sources, head, objective, torch.is_grad_enabled())
    total, sums = _SummedCrossEntropy.apply(hidden, weight, bias, job)  # type: ignore[no-untyped-call]
    return total, sums


@dataclass(frozen=True, slots=True)
class _Job:
    target_ids: Tensor
    target_sources: Tensor
    num_sources: int
    head: Head
    objective: Objective
    with_gradients: bool


class _SummedCrossEntropy(torch.autograd.Function):
    """Makes the gradients during the forward, chunk by chunk, so that no logits are kept or computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _Job) -> tuple[Tensor, Tensor]:
        gradients = _empty_gradients(hidden, weight, bias) if job.with_gradients else (None, None, None)
        losses = torch.empty(len(job.target_ids), dtype=torch.float32, device=hidden.device)
        chunk = max(1, CHUNK_ELEMENTS[hidden.device.type] // weight.shape[0])
        for start in range(0, len(job.target_ids), chunk):
            part = slice(start, start + chunk)
            ids = job.target_ids[part, None]
            logits = job.head.apply(linear(hidden[part], weight, bias))
            log_p = torch.log_softmax(logits, -1)
            lse = logits.gather(1, ids) - log_p.gather(1, ids)
            losses[part] = job.objective.losses(log_p, ids=ids, lse=lse)[:, 0]
            if job.with_gradients:
                d_logits = job.objective.backward(log_p.exp_(), ids=ids, lse=lse)
                d_logits = job.head.backward(d_logits, logits).to(weight.dtype)
                _add_gradients(gradients, d_logits, hidden=hidden, weight=weight, part=part)
        # A product, not a scatter: its order of summation is fixed on every device.
        of_source = torch.arange(job.num_sources, device=hidden.device)[:, None] == job.target_sources
        sums = (of_source.double() @ losses.double()).float()
        ctx.gradients = gradients
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(sums)
        return losses.double().sum().float(), sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        outer = gradients[0]
        scaled = [None if g is None else g.mul_(outer).to(ctx.dtype) for g in ctx.gradients]
        ctx.gradients = None
        return (*scaled, None)


def _empty_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Gradients:
    """Sums over many tokens are kept in float32, whatever the dtype of the weights."""
    return (
        torch.empty_like(hidden) if hidden.requires_grad else None,
        torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None,
        torch.zeros_like(bias, dtype=torch.float32) if bias is not None and bias.requires_grad else None,
    )


def _add_gradients(gradients: Gradients, d_logits: Tensor, *, hidden: Tensor, weight: Tensor, part: slice) -> None:
    d_hidden, d_weight, d_bias = gradients
    if d_hidden is not None:
        torch.mm(d_logits, weight, out=d_hidden[part])
    if d_weight is not None and d_weight.dtype == d_logits.dtype:
        d_weight.addmm_(d_logits.t(), hidden[part])
    elif d_weight is not None:
        d_weight += d_logits.t() @ hidden[part]
    if d_bias is not None:
        d_bias += d_logits.sum(0, dtype=torch.float32)


class LossModel(nn.Module):
    """A causal language model whose forward ends in the loss."""

    def __init__(self, model: Any, *, num_sources: int, objective: Objective = CROSS_ENTROPY) -> None:
        super().__init__()
        self.model = model
        self.num_sources = num_sources
        self.objective = objective
        self.balancing_loss = balancing_loss(model)
        self.text_config: dict[str, Any] = model.config.get_text_config().to_dict()
        self.head = Head.of(self.text_config)
        self.vision = VisionCard.of(model.config, model) if takes_images(model.config) else None

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        segments: Segments,
        target_positions: Tensor,
        target_ids: Tensor,
        target_sources: Tensor,
        is_token: Tensor | None = None,
        num_tokens: int = 0,
        targets_per_token: float = 1.0,
        **images: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """:func:`segment_loss` of a micro-batch; in evaluation mode always the cross-entropy, without balancing loss.

        Args:
            input_ids: [rows, length] int64
            position_ids: [rows, length] int64, from 0 in each segment; [4, rows, length] if it takes images
            segments: their bounds
            target_positions: [targets] int64 into the flattened rows: where a target is predicted
            target_ids: [targets] int64
            target_sources: [targets] int64
            is_token: [rows, length] bool: what is not padding
            num_tokens: how many that are; without any nothing is balanced
            targets_per_token: targets of the whole batch by its tokens
            images: ``pixel_values`` [patches, features] of all, one after another, and ``image_grid_thw`` [images, 3]
        """
        balanced = bool(self.objective.router_aux_loss_coef and self.training and num_tokens)
        asked: dict[str, Any] = {"output_router_logits": True} if balanced else {}
        output = self._output(input_ids, position_ids, segments, **asked, **images)
        head = self.model.get_output_embeddings()
        loss, sums = segment_loss(
            output.last_hidden_state.flatten(0, 1).index_select(0, target_positions),
            head.weight,
            head.bias,
            target_ids=target_ids,
            target_sources=target_sources,
            num_sources=self.num_sources,
            head=self.head,
            objective=self.objective if self.training else CROSS_ENTROPY,
        )
        if self.vision and not images:
            loss = loss + self._idle_tower(self.vision, device=input_ids.device)
        if balanced:
            assert self.balancing_loss is not None
            assert is_token is not None
            weight = self.objective.router_aux_loss_coef * targets_per_token * num_tokens
            loss = loss + weight * self.balancing_loss(output.router_logits, is_token)
        return loss, sums

    def _idle_tower(self, card: VisionCard, *, device: torch.device) -> Tensor:
        return nothing_of(self.model.base_model.get_image_features(**no_image(card, device=device)))

    def logits(self, input_ids: Tensor, *, position_ids: Tensor, segments: Segments, **images: Tensor) -> Tensor:
        """[rows, length, vocabulary] float32, by this module's own head."""
        hidden = self._output(input_ids, position_ids, segments, **images).last_hidden_state
        return self.head.apply(self.model.get_output_embeddings()(hidden))

    def native_logits(self, input_ids: Tensor, *, position_ids: Tensor, segments: Segments) -> Tensor:
        """[rows, length, vocabulary] float32, by the model's own forward."""
        output = self.model(input_ids=input_ids, position_ids=position_ids, segments=segments, use_cache=False)
        return output.logits.float()  # type: ignore[no-any-return]

    def last_logits(self, input_ids: Tensor, *, position_ids: Tensor, segments: Segments, last: Tensor) -> Tensor:
        """[rows, vocabulary] float32, of the token at ``last`` [rows] in each row."""
        hidden = self._output(input_ids, position_ids, segments).last_hidden_state
        hidden = hidden[torch.arange(len(last), device=last.device), last]
        return self.head.apply(self.model.get_output_embeddings()(hidden))

    def _output(self, input_ids: Tensor, position_ids: Tensor, segments: Segments, **asked: Any) -> Any:
        return self.model.base_model(
            input_ids=input_ids, position_ids=position_ids, segments=segments, use_cache=False, **asked
        )
