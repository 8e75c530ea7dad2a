"""B02: the loss of a step depends neither on the micro-batch, nor on packing, nor on the number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from burnish.backends.base import StepResult
from burnish.backends.tensors import model_inputs
from burnish.data.batch import IGNORE
from burnish.data.example import Example
from burnish.data.mixture import Mixture
from burnish.data.packing import Layout, plan_bins, plan_micro_batches
from burnish.data.samplers import SequentialSampler
from burnish.data.stream import BatchBuilder, BatchStream
from burnish.models.loss import LossModel
from tests.models.families import load_model
from tests.train.fakes import CountingBackend, ListStore, make_trainer

A, B = ([1, 2], [0, 1]), ([1, 2, 3, 4], [0, 1, 1, 1])
STORE = ListStore([Example(np.array(ids, np.int32), np.array(mask, np.uint8)) for ids, mask in (A, B)])
PLANNERS = {
    "micro-batches of 1": lambda lengths, layout: plan_micro_batches(
        lengths, micro_batch_size=1, share_row=True, layout=layout
    ),
    "micro-batches of 2": lambda lengths, layout: plan_micro_batches(
        lengths, micro_batch_size=2, share_row=True, layout=layout
    ),
    "padded": lambda lengths, layout: plan_micro_batches(lengths, micro_batch_size=2, share_row=False, layout=layout),
    "packed": lambda lengths, layout: plan_bins(lengths, capacity=8, layout=layout),
    "packed, with a filler": lambda lengths, layout: plan_bins(
        lengths, capacity=8, layout=replace(layout, micro_batch_multiple=3)
    ),
}


def stream_of(planner, *, rank, ranks):
    layout = Layout(rank, ranks)
    builder = BatchBuilder(
        Mixture([STORE]), planner=lambda lengths: PLANNERS[planner](lengths, layout), layout=layout, pad_id=0
    )
    return BatchStream(builder, sampler=SequentialSampler(2), batch_size=2)


def all_ranks(planner, ranks):
    """The batch with the micro-batches of all ranks: what they compute together."""
    batches = [next(iter(stream_of(planner, rank=rank, ranks=ranks))) for rank in range(ranks)]
    assert {(b.num_targets, b.num_tokens) for b in batches} == {(4, 6)}
    return replace(batches[0], micro_batches=tuple(m for b in batches for m in b.micro_batches))


class StubLosses(CountingBackend):
    """A target of the row of two tokens loses 4.0, one of the row of four 1.0."""

    def __init__(self, planner, ranks):
        super().__init__()
        self._batch = all_ranks(planner, ranks)

    def train_step(self, batch):
        loss, targets = 0.0, 0
        for m in self._batch.micro_batches:
            for labels, segments in zip(m.labels, m.segment_ids, strict=True):
                tokens = np.bincount(segments)
                for segment in segments[labels != IGNORE]:
                    loss += {2: 4.0, 4: 1.0}[int(tokens[segment])]
                    targets += 1
        return StepResult((loss,), (targets,), 1.0, 1e-3, False, {}, 0.0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("planner", PLANNERS)
def test_the_logged_loss_is_the_mean_over_all_targets(planner, ranks):
    trainer, _, recorder = make_trainer(backend=StubLosses(planner, ranks), rows=2, num_steps=1)
    trainer.train()
    assert recorder.lines[0][1]["train/loss"] == 7 / 4


@pytest.fixture(scope="module")
def model(model_dir):
    return LossModel(load_model(model_dir).train(), num_sources=1)


def loss_and_gradient(model, batch):
    model.zero_grad()
    total = 0.0
    for micro_batch in batch.micro_batches:
        loss, _ = model(**model_inputs(micro_batch, device=torch.device("cpu")))
        (loss / batch.num_targets).backward()
        total += loss.item()
    return total / batch.num_targets, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("planner", PLANNERS)
def test_the_gradient_is_the_same(model, planner, ranks):
    expected, gradient = loss_and_gradient(model, all_ranks("micro-batches of 1", 1))
    loss, got = loss_and_gradient(model, all_ranks(planner, ranks))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert (got - gradient).norm() <= 1e-6 * gradient.norm()
