"""Examples and a plan become the arrays of micro-batches. The one place where labels are shifted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burnish.data.example import Example, Images
from burnish.data.packing import Layout, MicroBatchPlan, round_up

IGNORE = -100
"""The label of a position that predicts nothing."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one or more examples each ("segments"). Padded and packed micro-batches are both this."""

    input_ids: NDArray[np.int64]
    """[rows, length]"""
    labels: NDArray[np.int64]
    """[rows, length]: the token that comes next in the same segment where that is a target, else ``IGNORE``"""
    segment_ids: NDArray[np.int32]
    """[rows, length]: 1, 2, ... along each row; 0 is padding"""
    segment_sources: NDArray[np.int32]
    """[rows, length]: number of the source the segment's row came from; 0 on padding"""
    images: tuple[Images, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One optimizer step, as seen by one rank."""

    micro_batches: tuple[MicroBatch, ...]
    """This rank's."""
    num_targets: int
    """Targets of the whole batch, over all ranks: what the summed loss is divided by."""
    num_tokens: int
    """Tokens of the whole batch, padding not counted."""
    row_numbers: tuple[int, ...]
    """Global numbers of the rows of the whole batch, in the order drawn."""
    step: int
    """The optimizer step this batch is for: 1 is the first of a run; 0 in an evaluation."""
    ends_epoch: bool
    """Whether the sampler's epoch is used up with this batch."""
    cursor: dict[str, Any]
    """Where the stream stands after this batch, JSON-ready; a checkpoint of this step holds it."""


def collate(
    examples: Mapping[int, Example],
    plan: MicroBatchPlan,
    *,
    sources: Mapping[int, int],
    pad_id: int,
    layout: Layout,
    length: int = 0,
) -> MicroBatch:
    """Lay ``examples`` out as ``plan`` says.

    Args:
        examples: by position in the drawn batch; those that ``plan`` names.
        plan: rows of positions.
        sources: by position, the number of the source.
        pad_id: token id written where no example is.
        layout: how segments and rows are padded.
        length: tokens a row has at least.
    """
    spans = [[round_up(len(examples[p].input_ids), layout.segment_multiple) for p in row] for row in plan]
    # A row is never empty: a rank without examples still has to take part in every collective of the step.
    shape = (len(plan), round_up(max(length, 1, *(sum(row) for row in spans)), layout.row_multiple))
    input_ids = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORE, np.int64)
    segment_ids = np.zeros(shape, np.int32)
    segment_sources = np.zeros(shape, np.int32)
    for r, row in enumerate(plan):
        start = 0
        for s, position in enumerate(row):
            example = examples[position]
            stop = start + len(example.input_ids)
            input_ids[r, start:stop] = example.input_ids
            # Taken from the wide copy: IGNORE does not fit the unsigned ids of a store.
            following = input_ids[r, start + 1 : stop]
            labels[r, start : stop - 1] = np.where(example.loss_mask[1:], following, IGNORE)
            segment_ids[r, start:stop] = s + 1
            segment_sources[r, start:stop] = sources[position]
            start += spans[r][s]
    images = (examples[p].images for row in plan for p in row)
    return MicroBatch(input_ids, labels, segment_ids, segment_sources, tuple(i for i in images if i is not None))
