"""A micro-batch of arrays becomes what every pipeline stage is called with: one row of sequences (THD).

Its rule: padded and packed rows are the same thing, and each stage gets the bounds, for each one attends.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from burnish.data.batch import IGNORE, MicroBatch
from burnish.data.packing import round_up


@dataclass(frozen=True, slots=True)
class StageInputs:
    """One micro-batch on one rank: ``tokens`` are those of the ranks that share its rows (context parallelism)."""

    input_ids: Tensor
    """[1, tokens] int64"""
    position_ids: Tensor
    """[1, tokens] int64, from 0 in each sequence; of a model that takes images [3, 1, tokens]"""
    sequences: PackedSeqParams
    """Where each sequence begins in the whole row."""
    target_positions: Tensor
    """[targets] int64 into ``tokens``"""
    target_ids: Tensor
    """[targets] int64"""
    target_sources: Tensor
    """[targets] int64"""
    images: Mapping[str, Tensor] = field(default_factory=dict)
    """On a first stage: ``pixel_values`` of all, one after another, and ``image_grid_thw``."""

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments of Megatron's ``GPTModel``."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": None,
            "packed_seq_params": self.sequences,
        }


def stage_inputs(
    micro_batch: MicroBatch, *, segment_multiple: int, parts: int, part: int, device: torch.device, num_tokens: int = 0
) -> StageInputs:
    """The rows of ``micro_batch`` one after another, as far as this rank holds them.

    Args:
        micro_batch: its segments and rows are padded as the layout asks.
        segment_multiple: of the layout.
        parts: ranks that share the rows.
        part: number of this one among them.
        device: of the tensors.
        num_tokens: of all rows together at least; what is missing is one more sequence of padding.
    """
    bounds = sequence_bounds(micro_batch.segment_ids, segment_multiple=segment_multiple)
    missing = max(0, num_tokens - int(bounds[-1]))
    bounds = np.append(bounds, num_tokens) if missing else bounds
    held = held_tokens(bounds, parts=parts, part=part)
    starts = np.repeat(bounds[:-1], np.diff(bounds))
    labels = _padded(micro_batch.labels, missing, IGNORE)[held]
    targets = np.flatnonzero(labels != IGNORE)
    sources = _padded(micro_batch.segment_sources, missing, 0)[held][targets]
    cuts, longest = _to(bounds.astype(np.int32), device), int(np.diff(bounds).max())
    return StageInputs(
        input_ids=_to(_padded(micro_batch.input_ids, missing, 0)[None, held], device),
        position_ids=_to((held - starts[held])[None], device),
        # Padding follows the tokens of its segment, so no token of it is ever seen: the padded bounds are exact.
        sequences=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cuts,
            cu_seqlens_kv=cuts,
            cu_seqlens_q_padded=cuts,
            cu_seqlens_kv_padded=cuts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        target_positions=_to(targets, device),
        target_ids=_to(labels[targets], device),
        target_sources=_to(sources.astype(np.int64), device),
    )


def sequence_bounds(segment_ids: NDArray[np.int32], *, segment_multiple: int) -> NDArray[np.int64]:
    """[sequences + 1] where each begins in the rows one after another, and the last one ends.

    A sequence is a segment with its padding; what is left of a row is one more.
    """
    length = segment_ids.shape[1]
    bounds = [0]
    for row, ids in enumerate(segment_ids):
        begins = np.flatnonzero(np.diff(ids, prepend=0) > 0)
        used = 0
        if len(begins):
            used = int(begins[-1]) + round_up(int(np.count_nonzero(ids == ids.max())), segment_multiple)
        cuts = dict.fromkeys([*begins.tolist(), min(used, length), length])
        bounds += [row * length + cut for cut in cuts if cut]
    return np.array(bounds, np.int64)


def held_tokens(bounds: NDArray[np.int64], *, parts: int, part: int) -> NDArray[np.int64]:
    """[tokens / parts] positions of the tokens of one of ``parts`` ranks.

    Each sequence is cut into twice as many chunks, of which a rank holds one from the front and one from the back, so
    that causal attention costs all of them the same (Megatron's zig-zag).
    """
    if parts == 1:
        return np.arange(bounds[-1])
    chunk = np.diff(bounds) // (2 * parts)
    front, back = bounds[:-1] + part * chunk, bounds[:-1] + (2 * parts - 1 - part) * chunk
    begins, sizes = np.stack([front, back], 1).ravel(), np.repeat(chunk, 2)
    # Each chunk counts on from where it begins.
    held: NDArray[np.int64] = np.arange(sizes.sum()) + np.repeat(begins - np.cumsum(sizes) + sizes, sizes)
    return held


def _padded(rows: NDArray[Any], missing: int, value: int) -> NDArray[Any]:
    return np.pad(rows.reshape(-1), (0, missing), constant_values=value)


def _to(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
