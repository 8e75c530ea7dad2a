"""B15: an evaluation is the mean over all targets, for any micro-batch and any number of ranks."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from burnish.data.batch import IGNORE
from burnish.data.example import Example
from burnish.data.mixture import Mixture
from burnish.data.packing import Layout, plan_bins, plan_micro_batches
from burnish.data.stream import BatchBuilder, EvalBatches
from burnish.models.loss import LossModel
from burnish.train.evaluation import evaluate
from tests.backends.steps import example as example_of
from tests.backends.steps import opened
from tests.ranks import on_ranks
from tests.train.fakes import ListStore


def example(targets):
    return Example(np.arange(targets + 1, dtype=np.int32), np.ones(targets + 1, np.uint8))


FIVE = ListStore([example(targets) for targets in (1, 1, 1, 1, 2)])
ONE = ListStore([example(2)])


class AllRanks:
    """Sums what every rank computes of a batch: 2.0 for the one target of a row of two tokens, else 0.5 for each."""

    def __init__(self, store, *, plan, ranks, batch_size):
        of_ranks = []
        for rank in range(ranks):
            builder = BatchBuilder(
                Mixture([store]),
                planner=lambda lengths, _: plan(lengths, Layout(data_size=ranks)),
                layout=Layout(rank, ranks),
                pad_id=0,
            )
            of_ranks.append(list(EvalBatches(builder, batch_size=batch_size)))
        self.batches = of_ranks[0]
        self._next = zip(*of_ranks, strict=True)

    def eval_loss(self, batch):
        loss = 0.0
        for own in next(self._next):
            assert (own.num_targets, len(own.micro_batches)) == (batch.num_targets, len(batch.micro_batches))
            for m in own.micro_batches:
                for labels, segments in zip(m.labels, m.segment_ids, strict=True):
                    tokens = np.bincount(segments)
                    loss += sum(2.0 if tokens[segment] == 2 else 0.5 for segment in segments[labels != IGNORE])
        return loss, batch.num_targets


def by_number(size, *, share_row=True):
    return lambda lengths, layout: plan_micro_batches(
        lengths, micro_batch_size=size, share_row=share_row, layout=layout
    )


def in_bins(lengths, layout):
    return plan_bins(lengths, capacity=5, layout=layout)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("plan", [by_number(1), by_number(2), by_number(2, share_row=False), by_number(8), in_bins])
def test_the_mean_over_targets(plan, ranks, batch_size):
    backend = AllRanks(FIVE, plan=plan, ranks=ranks, batch_size=batch_size)
    metrics = evaluate(backend, sets={"held": backend.batches})
    assert metrics["eval/held/loss"] == 9 / 6
    assert metrics["eval/held/num_targets"] == 6


@pytest.mark.parametrize("plan", [by_number(1), by_number(8), in_bins])
def test_one_row_on_four_ranks(plan):
    backend = AllRanks(ONE, plan=plan, ranks=4, batch_size=8)
    assert evaluate(backend, sets={"held": backend.batches})["eval/held/loss"] == 0.5


def stub_losses(self, input_ids, *, target_ids, **others):
    """2.0 for token 4, 0.5 for any other."""
    return torch.where(target_ids == 4, 2.0, 0.5).sum(), None


def on_a_rank(folder, share, size, num_rows):
    rows = [example_of([5, 6, 7], [0, 1, 1]), *[example_of([3, 4], [0, 1])] * 4][:num_rows]
    plan = by_number(size) if size else in_bins
    with opened(folder, share=share, num_steps=1) as backend, patch.object(LossModel, "forward", stub_losses):
        builder = BatchBuilder(
            Mixture([ListStore(rows)]),
            planner=lambda lengths, _: plan(lengths, backend.layout),
            layout=backend.layout,
            pad_id=0,
        )
        return evaluate(backend, sets={"held": EvalBatches(builder, batch_size=5)})


@pytest.mark.parametrize(
    ("ranks", "share", "size", "num_rows", "mean"),
    [(4, 1, 1, 5, 9 / 6), (4, 2, 0, 5, 9 / 6), (2, 1, 2, 5, 9 / 6), (2, 2, 8, 5, 9 / 6), (4, 1, 8, 1, 0.5)],
)
def test_the_same_on_ranks(model_dir, ranks, share, size, num_rows, mean):
    for metrics in on_ranks(ranks, on_a_rank, model_dir, share, size, num_rows):
        assert metrics["eval/held/loss"] == mean
        assert metrics["eval/held/num_targets"] == num_rows + 1
