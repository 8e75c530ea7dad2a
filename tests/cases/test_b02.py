"""B02: the loss of a step depends neither on the micro-batch, nor on packing, nor on the number of ranks."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

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
from tests.backends.steps import batch_of, example, opened
from tests.models.families import load_model
from tests.ranks import on_ranks
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
        Mixture([STORE]), planner=lambda lengths, _: PLANNERS[planner](lengths, layout), layout=layout, pad_id=0
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


def stub_losses(self, input_ids, *, target_sources, **others):
    """A target of the first source loses 4.0, one of the second 1.0; the weights have no part in it."""
    each = torch.where(target_sources == 0, 4.0, 1.0)
    total = each.sum() + 0.0 * self.model.get_output_embeddings().weight.sum()
    return total, torch.stack([each[target_sources == source].sum() for source in range(2)])


def on_a_rank(folder, share, layout):
    """The loss of a step with stub losses, the loss of a real one, and its gradients."""
    with opened(folder, share=share, num_steps=2, num_sources=2, learning_rate=0.0, max_grad_norm=None) as backend:
        step = partial(batch_of, [example(*A), example(*B)], place=backend.layout, **layout)
        with patch.object(LossModel, "forward", stub_losses):
            stubbed = backend.train_step(step(step=1)).loss
        loss = backend.train_step(step(step=2)).loss
        # After a step without gradients the first moments are a tenth of those of the second.
        moments = backend._tensors(with_moments=True)["exp_avg"].values()
        return stubbed, loss, np.concatenate([moment.full_tensor().numpy().ravel() / 0.1 for moment in moments])


@pytest.mark.parametrize(
    ("ranks", "share", "layout"),
    [
        (2, 1, {"micro_batch_size": 1}),
        (2, 2, {"layout": "packed"}),
        (4, 1, {"layout": "padded"}),
        (4, 2, {"micro_batch_size": 2}),
    ],
    ids=str,
)
def test_the_same_on_ranks(model_dir, ranks, share, layout):
    """On four ranks of their own two hold filler rows only."""
    _, expected, gradient = on_a_rank(model_dir, 1, {"micro_batch_size": 1})
    for stubbed, loss, got in on_ranks(ranks, on_a_rank, model_dir, share, layout):
        assert stubbed == 7 / 4
        assert loss == pytest.approx(expected, rel=1e-6)
        assert np.linalg.norm(got - gradient) <= 1e-6 * np.linalg.norm(gradient)
