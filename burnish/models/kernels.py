"""Which kernel computes attention inside segments, and the two that need a GPU. Its rule: the fastest that is exact.

The kernels know no segments: they get bounds, or the number of each token's segment, as tensors.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from burnish.errors import ConfigError, Problem


class Kernel(StrEnum):
    """Ways to compute it, the fastest first, as ``model.attention`` spells them."""

    FLASH = "flash"
    """Flash attention over rows of several segments, ``torch.nn.attention.varlen``."""
    FLEX = "flex"
    """A kernel compiled for the blocks that hold a segment, ``torch.nn.attention.flex_attention``."""
    SDPA = "sdpa"
    """One call a segment of ``scaled_dot_product_attention``; of what it lacks, the formula."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model on a device asks of a kernel."""

    device_type: str
    """``cuda`` or ``cpu``."""
    dtype: torch.dtype
    """Of the computation."""
    head_dim: int
    softcap: bool = False
    """Whether scores are bounded, as in Gemma 2."""
    dropout: bool = False
    """Whether weights of attention are dropped."""
    has_varlen: bool = True
    """Whether this torch can do flash attention over segments with windows and scales of one's own."""

    @classmethod
    def of(cls, config: Any, *, device_type: str, dtype: torch.dtype) -> "Demand":
        """That of the text model with ``config``."""
        facts = config.to_dict()
        return cls(
            device_type=device_type,
            dtype=dtype,
            head_dim=int(facts.get("head_dim") or config.hidden_size // config.num_attention_heads),
            softcap=bool(facts.get("attn_logit_softcapping")),
            dropout=bool(facts.get("attention_dropout")),
            has_varlen=bool(_varlen_arguments()),
        )


def choose_kernel(wanted: str, demand: Demand) -> Kernel:
    """``wanted``, or the fastest for ``auto``.

    Raises:
        ConfigError: what is wanted cannot serve ``demand``.
    """
    if wanted == "auto":
        return next(kernel for kernel in Kernel if not unfit(kernel, demand))
    kernel = Kernel(wanted)
    if reason := unfit(kernel, demand):
        raise ConfigError([Problem("model.attention", wanted, reason, "write auto, which picks one that can")])
    return kernel


def unfit(kernel: Kernel, demand: Demand) -> str:
    """Why ``kernel`` cannot serve ``demand``; "" if it can."""
    if kernel is Kernel.SDPA:
        return ""
    if demand.device_type != "cuda":
        return f"needs a CUDA GPU, and this run computes on {demand.device_type}"
    if demand.dropout:
        return "has no dropout inside attention, which this model asks for"
    if kernel is Kernel.FLEX:
        return ""
    reasons = {
        "needs a torch whose varlen_attn knows windows and scales": not demand.has_varlen,
        f"computes in bfloat16, not {str(demand.dtype).removeprefix('torch.')}": demand.dtype != torch.bfloat16,
        "cannot bound scores, which this model does": demand.softcap,
        f"takes heads of a multiple of 8 up to 256 wide, not {demand.head_dim}": demand.head_dim > 256
        or demand.head_dim % 8 > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention between each two neighbours in ``bounds``.

    Args:
        query: [rows, heads, length, head width]
        key: [rows, key heads, length, head width]
        value: as ``key``.
        bounds: [segments + 1] int32 where each begins in the rows one after another, and the last one ends.
        longest: tokens of the longest segment.
        scaling: factor of the scores.
        window: a token sees this many, itself included.

    Returns:
        [rows, length, heads, head width]
    """
    from torch.nn.attention.varlen import varlen_attn

    rows, _, length, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    known = _varlen_arguments()
    settings: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if "enable_gqa" in known else {}
    # The kernel counts the tokens before one's own.
    sight = (-1 if window is None else window - 1, 0)
    output: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=sight, **settings)
    return output.unflatten(0, (rows, length))  # type: ignore[no-any-return]


def flex(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Any, scaling: float | None, softcap: float | None
) -> Tensor:
    """Attention where ``mask`` (of :func:`block_mask`) lets it; shapes as in :func:`flash`."""
    output = _compiled_flex(query.device.type)(
        query,
        key,
        value,
        score_mod=None if softcap is None else _bounded(softcap),
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous()  # type: ignore[no-any-return]


def block_mask(segments: Tensor, *, window: int | None) -> Any:
    """The pairs of a token and one it sees, for :func:`flex`.

    Args:
        segments: [rows, length] a number for each token; those of one segment have the same.
        window: a token sees this many, itself included.
    """
    rows, length = segments.shape
    sight = length if window is None else window

    def seen(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del head
        return (k <= q) & (q - k < sight) & (segments[row, q] == segments[row, k])

    return _compiled_mask(segments.device.type)(seen, rows, None, length, length, device=segments.device)


@cache
def _varlen_arguments() -> frozenset[str]:
    """Names that ``varlen_attn`` takes; none where it is missing or takes too little."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    names = frozenset(signature(varlen_attn).parameters)
    return names if {"window_size", "scale"} <= names else frozenset()


@cache
def _compiled_flex(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


@cache
def _compiled_mask(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    # Uncompiled, it would hold every pair of tokens for a moment.
    return torch.compile(create_block_mask) if device_type == "cuda" else create_block_mask


@cache
def _bounded(softcap: float) -> Any:
    def bounded(score: Tensor, row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del row, head, q, k
        return softcap * torch.tanh(score / softcap)

    return bounded
