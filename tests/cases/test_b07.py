"""B07: no token of one example may be seen by, or predicted from, another example of the same row."""

import numpy as np
import pytest
import torch

from burnish.backends.tensors import model_inputs
from burnish.data.batch import IGNORE, collate
from burnish.data.example import Example
from burnish.data.packing import Layout, plan_bins
from burnish.models.loss import LossModel
from tests.models.families import load_model

CPU = torch.device("cpu")


def example(ids, mask):
    return Example(np.array(ids, np.int32), np.array(mask, np.uint8))


A, B = example([1, 2, 3], [0, 1, 1]), example([4, 5, 6, 7], [1, 1, 0, 1])


def one_row(*examples):
    plan = plan_bins([len(e.input_ids) for e in examples], capacity=8, layout=Layout())[0]
    assert len(plan) == 1
    return collate(
        dict(enumerate(examples)), plan[0], sources=dict.fromkeys(range(len(examples)), 0), pad_id=0, layout=Layout()
    )


@pytest.fixture
def model(model_dir):
    return LossModel(load_model(model_dir).eval(), num_sources=1)


def test_positions_targets_and_bounds_literal():
    row = one_row(A, B)
    inputs = model_inputs(row, device=CPU)
    assert row.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert row.labels.tolist() == [[2, 3, IGNORE, 5, IGNORE, 7, IGNORE]]
    assert inputs["target_positions"].tolist() == [0, 1, 3, 5]
    assert inputs["target_ids"].tolist() == [2, 3, 5, 7]
    assert inputs["segments"].rows == (((0, 3), (3, 7)),)


@torch.no_grad()
def test_other_ids_in_a_change_no_logit_of_b(model):
    def logits(first):
        inputs = model_inputs(one_row(first, B), device=CPU)
        return model.logits(inputs["input_ids"], position_ids=inputs["position_ids"], segments=inputs["segments"])[0]

    before, after = logits(A), logits(example([9, 9, 9], [0, 1, 1]))
    assert torch.equal(before[3:], after[3:])
    assert not torch.equal(before[:3], after[:3])


@torch.no_grad()
def test_packed_loss_is_the_loss_of_the_two_rows(model):
    packed = model(**model_inputs(one_row(A, B), device=CPU))[0].item() / 4
    alone = sum(model(**model_inputs(one_row(e), device=CPU))[0].item() for e in (A, B)) / 4
    assert packed == pytest.approx(alone, rel=1e-5)
