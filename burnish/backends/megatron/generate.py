"""Rows become the likeliest token after each, on however many ranks. Its rule: they travel as rows of an evaluation do.

Each row gets one more token, whose place says which hidden state is looked at; its source is the row's number.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from burnish.backends.megatron.loss import VocabularyPart
from burnish.data.batch import MicroBatch, collate
from burnish.data.example import Example
from burnish.data.packing import Layout


def asked(rows: Sequence[Sequence[int]], *, layout: Layout) -> MicroBatch:
    """``rows`` one after another, with the one target of each after its last token."""
    examples = {
        number: Example(np.array([*row, 0]), np.append(np.zeros(len(row), np.uint8), np.uint8(1)))
        for number, row in enumerate(rows)
    }
    numbers = tuple(examples)
    return collate(examples, (numbers,), sources=dict(zip(numbers, numbers, strict=True)), pad_id=0, layout=layout)


def likeliest(hidden: Tensor, weight: Tensor, *, vocabulary: VocabularyPart) -> Tensor:
    """[rows] int64 after ``hidden`` [rows, width]; of two that are equally likely the first. Equal on all ranks of it."""
    own = weight[: max(0, vocabulary.size - vocabulary.first)]
    best, token = linear(hidden, own).float().max(1)
    highest = vocabulary.max(best.clone())
    token = torch.where(best == highest, token + vocabulary.first, vocabulary.size)
    dist.all_reduce(token, dist.ReduceOp.MIN, group=vocabulary.group)
    return token
