"""Rows become the likeliest token after each, all ranks together. Its rule: rank 0 says which one it is."""

from collections.abc import Sequence

import numpy as np
import torch

from burnish.backends.comm import Ranks
from burnish.models.attention import Segments
from burnish.models.loss import LossModel


@torch.no_grad()
def next_tokens(model: LossModel, rows: Sequence[Sequence[int]], *, ranks: Ranks) -> list[int]:
    """The likeliest token after each of ``rows``, which are padded at their ends; equal on all ranks."""
    lengths = np.array([len(row) for row in rows])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(is_token.shape, np.int64)
    ids[is_token] = np.concatenate(rows)
    segments = Segments.of(is_token.astype(np.int32))
    inputs, positions, last = (
        torch.from_numpy(array).to(ranks.device) for array in (ids, segments.positions(), lengths - 1)
    )
    likeliest = model.last_logits(inputs, position_ids=positions, segments=segments, last=last).argmax(-1)
    # Two ranks may find another one likeliest when two are equally likely, and all must do the same next.
    tokens: list[int] = ranks.gather(likeliest.tolist())[0]
    return tokens
