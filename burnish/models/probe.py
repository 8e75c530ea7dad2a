"""A model is tried out on a dozen tokens before training: is what we compute what the model means?

Each check returns what is wrong, or "". Its rule: a difference is measured against one that must exist.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.models.attention import Exchange, Segments
from burnish.models.load import attention_of
from burnish.models.loss import LossModel

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers, as configs name them, that stay inside a segment."""
LENGTH = 12


@torch.no_grad()
def head_problem(model: LossModel, *, device: torch.device, dtype: torch.dtype) -> str:
    """Why the loss would not be this model's: its own logits are not those the loss is made of."""
    if "chunked_attention" in (model.text_config.get("layer_types") or ()):
        return "its chunked_attention layers are not plain causal attention"
    ids, _ = _two_rows(model, device=device)
    inputs = _inputs(Segments.whole(1, length=LENGTH), device=device)
    native = model.native_logits(ids, **inputs)
    error = float((model.logits(ids, **inputs) - native).norm() / native.norm())
    if not error <= _tolerance(dtype):
        return f"its logits are not its head times its hidden states (they differ by {error:.1e} of their size)"
    own = model.model.config.get_text_config()._attn_implementation
    model.model.set_attn_implementation(attention_of(model.model.config, "eager"))
    error = float((model.native_logits(ids, **inputs) - native).norm() / native.norm())
    model.model.set_attn_implementation(attention_of(model.model.config, own))
    if not error <= _tolerance(dtype):
        return f"its attention is not plain causal attention (logits differ by {error:.1e} of their size)"
    return ""


@torch.no_grad()
def isolation_problem(model: LossModel, *, device: torch.device, dtype: torch.dtype) -> str:
    """Why a row of this model must hold one segment only.

    Two segments share a row; when the tokens of the first change, no logit of the second may.
    """
    kinds = sorted(set(model.text_config.get("layer_types") or ()) - LAYER_TYPES)
    if kinds:
        return f"its {', '.join(kinds)} layers carry state from one segment into the next"
    first, second = _two_rows(model, device=device)
    half = LENGTH // 2
    second[:, half:] = first[:, half:]
    inputs = _inputs(Segments.of(np.repeat(np.array([[1, 2]], np.int32), half, axis=1)), device=device)
    change = model.logits(first, **inputs) - model.logits(second, **inputs)
    error = float(change[:, half:].norm() / change[:, :half].norm())
    if not error <= _tolerance(dtype):
        return f"other tokens in one segment change the logits of the next ({error:.1e} of the change of their own)"
    return ""


@torch.no_grad()
def parts_problem(model: LossModel, exchange: Exchange, *, device: torch.device, dtype: torch.dtype) -> str:
    """Why ranks must not hold a part each of this model's rows: it gives other logits then. All ranks try it together.

    The rows' parts begin inside segments, so that whatever a layer should have carried over is missed.
    """
    length = LENGTH * exchange.size
    first, second = _two_rows(model, device=device)
    ids = torch.cat([first, second], 1).repeat(1, exchange.size)[:, :length]
    whole = Segments.of(np.repeat(np.array([[1, 2]], np.int32), [5, length - 5], axis=1))
    inputs, held = _inputs(whole, device=device), exchange.part(length)
    expected = model.logits(ids, **inputs)[:, held]
    own = model.logits(
        ids[:, held], position_ids=inputs["position_ids"][:, held], segments=replace(whole, exchange=exchange)
    )
    error = float((own - expected).norm() / expected.norm())
    if not error <= _tolerance(dtype):
        return (
            f"tokens of the row's other parts do not reach its logits as they should (off by {error:.1e} of their size)"
        )
    return ""


def _tolerance(dtype: torch.dtype) -> float:
    """Two ways to compute the same differ by 1e-6 in float32; in bfloat16 by some percent in a deep model."""
    return 1e-4 if dtype == torch.float32 else 0.1


def _inputs(segments: Segments, *, device: torch.device) -> dict[str, Any]:
    return {"segments": segments, "position_ids": torch.from_numpy(segments.positions()).to(device)}


def _two_rows(model: LossModel, *, device: torch.device) -> tuple[Tensor, Tensor]:
    vocabulary = int(model.text_config["vocab_size"])
    ids = (torch.arange(2 * LENGTH, device=device) * 7 + 3) % vocabulary
    return ids[None, :LENGTH], ids[None, LENGTH:]
