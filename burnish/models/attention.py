"""Attention that stays inside a segment. Its rule: no token ever sees a token of another segment.

``transformers`` calls :func:`segment_attention` in each layer under a name of ours; because that name has no mask
function, no mask is ever built. The bounds of the segments travel as the keyword argument ``segments`` of
``model(...)`` down to it, so nothing is global.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from burnish.errors import BurnishError
from burnish.models.kernels import Kernel, block_mask, flash, flex

# Without the kernels' own names: transformers would take one for its own.
NAMES = {Kernel.SDPA: "burnish", Kernel.FLASH: "burnish_varlen", Kernel.FLEX: "burnish_blocks"}
"""The names of this attention in ``transformers``."""
Span: TypeAlias = tuple[int, int]


class Exchange(Protocol):
    """Between ranks that hold a part each of the same rows."""

    @property
    def size(self) -> int:
        """The number of these ranks."""
        ...

    def part(self, length: int) -> slice:
        """The tokens of a row of ``length`` that this rank holds."""
        ...

    def whole_rows(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """All heads of this rank's part of the rows -> some heads of the whole rows; shapes as in attention."""
        ...

    def own_part(self, output: Tensor) -> Tensor:
        """Back: [rows, length, some heads, width] -> [rows, part of the length, heads, width]."""
        ...


@dataclass(frozen=True, slots=True)
class Segments:
    """Where each segment of a micro-batch begins and ends, in whole rows."""

    rows: tuple[tuple[Span, ...], ...]
    """For each row, (start, stop) of its runs of equal segment ids; padding is a run like any other, so that the runs
    cover the row."""
    one_per_row: bool
    """Whether no row holds more than one segment, and each begins at 0: plain causal attention isolates them."""
    exchange: Exchange | None = None
    """With the ranks that hold the other parts of these rows; None where the rows are whole here."""
    made: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """What kernels need of them on their device; made by the first layer that asks."""

    @classmethod
    def of(cls, segment_ids: NDArray[np.int32], exchange: Exchange | None = None) -> "Segments":
        """The runs of ``segment_ids`` [rows, length]; 0 is padding."""
        rows = []
        for row in segment_ids:
            cuts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
            rows.append(tuple(pairwise(cuts)))
        one_per_row = all(
            len(row) == 1 or (len(row) == 2 and ids[row[1][0]] == 0) for row, ids in zip(rows, segment_ids, strict=True)
        )
        return cls(tuple(rows), one_per_row, exchange)

    @classmethod
    def whole(cls, num_rows: int, *, length: int) -> "Segments":
        """One segment of ``length`` tokens in each row."""
        return cls((((0, length),),) * num_rows, one_per_row=True)

    def positions(self) -> NDArray[np.int64]:
        """[rows, length]: the position of each token in its segment."""
        return np.stack([np.concatenate([np.arange(b - a) for a, b in row]) for row in self.rows])

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, kept under ``key``."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    @property
    def longest(self) -> int:
        """Tokens of the longest run."""
        return max(b - a for row in self.rows for a, b in row)

    def bounds(self, device: torch.device) -> Tensor:
        """[runs + 1] int32 where each begins in the rows one after another, and the last one ends."""
        sizes = [b - a for row in self.rows for a, b in row]
        return _sent(np.cumsum([0, *sizes], dtype=np.int32), device)

    def numbers(self, device: torch.device) -> Tensor:
        """[rows, length] int32: the number, in its row, of the run that each token is in."""
        return _sent(
            np.stack([np.repeat(np.arange(len(r), dtype=np.int32), np.diff(r).ravel()) for r in self.rows]), device
        )


def register(kernel: Kernel = Kernel.SDPA, *, compiled: bool = False) -> str:
    """Make this attention, by ``kernel``, known to ``transformers``; returns its name.

    Args:
        kernel: computes it.
        compiled: whether layers are compiled; they then call it as it is, for its loops depend on the segments.
    """
    from transformers import AttentionInterface

    attend: Any = partial(segment_attention, kernel=kernel)
    AttentionInterface.register(
        NAMES[kernel],
        torch.compiler.disable(attend) if compiled else attend,  # type: ignore[no-untyped-call]
    )
    return NAMES[kernel]


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kernel: Kernel = Kernel.SDPA,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment.

    Args:
        module: the attention layer, named when it asks for something that cannot be honoured.
        query: [rows, heads, length, head width]; of ``length`` this rank holds a part where it shares rows
        key: [rows, key heads, length, head width]
        value: as ``key``.
        attention_mask: must be None.
        segments: of the micro-batch; never None but for a model that does not hand arguments down to its attention.
        dropout: probability, 0 in evaluation.
        scaling: factor of the scores; by default one over the root of the head width.
        sliding_window: a token sees this many tokens, itself included; None is all.
        softcap: bounds the scores, as in Gemma 2; None is no bound.
        kernel: computes it.
        others: what layers hand to any attention; harmless except for those refused here.

    Returns:
        [rows, length, heads, value width], and no weights.

    Raises:
        BurnishError: a layer asks for a mask, a bias, sinks or attention to later tokens, or gets no segments.
    """
    segments = _given(segments, module)
    _refuse_unknown(module, attention_mask, others)
    if dropout or (softcap is not None and kernel is Kernel.FLASH):
        kernel = Kernel.SDPA  # a layer may ask for what its config does not tell
    attend = _inside(segments, kernel, dropout=dropout, scaling=scaling, window=sliding_window, softcap=softcap)
    if segments.exchange is None:
        return attend(query, key, value), None
    output = attend(*segments.exchange.whole_rows(query, key, value))
    return segments.exchange.own_part(output), None


def _inside(
    segments: Segments,
    kernel: Kernel,
    *,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of query, key and value inside ``segments`` of whole rows."""
    if kernel is Kernel.SDPA:
        settings: Any = {"dropout": dropout, "scaling": scaling, "window": window, "softcap": softcap}
        return partial(_each_alone, segments=segments, **settings)

    def by_flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bounds = segments.once("bounds", lambda: segments.bounds(query.device))
        return flash(query, key, value, bounds=bounds, longest=segments.longest, scaling=scaling, window=window)

    def by_flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = segments.once(window, lambda: block_mask(segments.numbers(query.device), window=window))
        return flex(query, key, value, mask=mask, scaling=scaling, softcap=softcap)

    return by_flash if kernel is Kernel.FLASH else by_flex


def _each_alone(query: Tensor, key: Tensor, value: Tensor, *, segments: Segments, **settings: Any) -> Tensor:
    """A call a segment."""
    attend: Any = partial(_attend, **settings)
    if segments.one_per_row:
        whole: Tensor = attend(query, key, value)
        return whole.transpose(1, 2).contiguous()
    rows = []
    for r, spans in enumerate(segments.rows):
        parts = [attend(*(x[r : r + 1, :, a:b] for x in (query, key, value))) for a, b in spans]
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows).transpose(1, 2).contiguous()


def _sent(array: NDArray[np.int32], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _given(segments: Segments | None, module: nn.Module) -> Segments:
    if segments is None:
        raise BurnishError(
            f"attention of {type(module).__name__}",
            "this model does not hand the bounds of segments down to it",
            fix="train a model that passes keyword arguments of its forward on to its attention",
        )
    return segments


def _refuse_unknown(module: nn.Module, attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    asked = {"attention_mask": attention_mask, **{name: others.get(name) for name in ("s_aux", "position_bias")}}
    wrong = [name for name, value in asked.items() if value is not None]
    if others.get("is_causal") is False or module.__dict__.get("is_causal") is False:
        wrong.append("is_causal=False")
    if wrong:
        raise BurnishError(
            f"attention of {type(module).__name__}",
            f"it asks for {', '.join(wrong)}, which attention inside segments cannot honour",
            fix="train a model without attention sinks, attention biases and non-causal layers",
        )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    if softcap is not None:
        return _softcapped(query, key, value, dropout=dropout, scaling=scaling, window=window, softcap=softcap)
    mask = None if window is None or window >= query.shape[2] else _window(query, window)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _window(query: Tensor, window: int) -> Tensor:
    """[length, length] bool: the last ``window`` tokens up to and including one's own."""
    length = query.shape[2]
    ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return ones.tril().triu(1 - window)


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_window(query, window or query.shape[2]), -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return drop(weights, dropout) @ value
