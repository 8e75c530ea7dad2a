import math

import pytest
import torch
from torch import nn

from burnish.backends.optimizer import Recipe, build_optimizer, learning_rate, optimizer_tensors
from burnish.config.choices import Schedule
from burnish.errors import ConfigError


def rates(schedule, *, num_steps=12, **settings):
    return [
        learning_rate(s, schedule=schedule, lr=1.0, num_steps=num_steps, **settings) for s in range(1, num_steps + 1)
    ]


def test_linear_literal():
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert rates(Schedule.LINEAR, num_warmup_steps=4) == expected


def test_constant_literal():
    assert rates(Schedule.CONSTANT, num_warmup_steps=4) == [1.0] * 12
    assert rates(Schedule.CONSTANT_WITH_WARMUP, num_warmup_steps=4) == [0.25, 0.5, 0.75, *[1.0] * 9]


def test_cosine_literal():
    half = (1 + math.cos(math.pi * 0.5)) / 2
    found = rates(Schedule.COSINE, num_warmup_steps=4, min_lr_ratio=0.1)
    assert found[3:5] == [1.0, 1.0]
    assert found[8] == pytest.approx(0.1 + 0.9 * half)
    assert found[11] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 7 / 8)) / 2)


def test_wsd_is_stable_and_decays_over_the_last_tenth():
    found = rates(Schedule.WSD, num_steps=40, num_warmup_steps=2)
    assert found[:2] == [0.5, 1.0]
    assert found[2:37] == [1.0] * 35
    assert found[37:] == [0.75, 0.5, 0.25]


def test_inverse_sqrt_halves_after_three_warm_ups():
    found = rates(Schedule.INVERSE_SQRT, num_steps=20, num_warmup_steps=4)
    assert found[4] == 1.0
    assert found[16] == 0.5


def test_a_warm_up_below_one_is_a_share():
    assert rates(Schedule.LINEAR, num_warmup_steps=0.3) == rates(Schedule.LINEAR, num_warmup_steps=4)
    seven = rates(Schedule.LINEAR, num_steps=100, num_warmup_steps=7)
    assert rates(Schedule.LINEAR, num_steps=100, num_warmup_steps=0.07) == seven, "0.07 * 100 is above 7 in binary"


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("warmup", [0, 3, 0.25, 50])
@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_every_step_trains_and_none_is_above_the_peak(schedule, warmup, ratio):
    found = rates(schedule, num_warmup_steps=warmup, min_lr_ratio=ratio)
    assert all(0 < rate <= 1.0 for rate in found)
    beyond = learning_rate(500, schedule=schedule, lr=1.0, num_steps=12, num_warmup_steps=warmup, min_lr_ratio=ratio)
    assert ratio <= beyond <= 1.0


def test_norms_and_biases_do_not_decay():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(dict(model.named_parameters()), Recipe(weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    shrunk = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert shrunk == [True, False, False, False]


def test_frozen_parameters_are_left_out():
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(dict(model.named_parameters()), Recipe(weight_decay=0.5))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    assert list(optimizer_tensors(optimizer, dict(model.named_parameters()))["exp_avg"]) == ["weight"]


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ConfigError, match=r"optimizer_config.name='sgd'"):
        build_optimizer({}, Recipe(optimizer="sgd"))
