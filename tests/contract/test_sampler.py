"""What every sampler promises."""

import json
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from burnish.data.samplers import DataMixingSampler, RandomSampler, Sampler, SequentialSampler, load_custom_sampler

MAKERS = {
    "sequential": lambda: SequentialSampler(11),
    "random": lambda: RandomSampler(11, seed=3),
    "one row": lambda: RandomSampler(1, seed=3),
    "mixing": lambda: DataMixingSampler(range(11), lengths=[4, 1, 6], weights=[2, 0.5, 0.7], seed=3),
    "custom": lambda: load_custom_sampler(
        "burnish.data.samplers.DataMixingSampler",
        dataset=range(11),
        kwargs={"weights": [1, 3]},
        source_lengths=[9, 2],
    ),
    "the example": lambda: load_custom_sampler(
        "examples.curriculum.order.ShortFirst",
        dataset=SimpleNamespace(lengths=np.array([5, 1, 9, 9, 2, 7, 3, 8, 6, 4, 1])),
        kwargs={"groups": 3},
        source_lengths=[11],
    ),
}


@pytest.fixture(params=list(MAKERS))
def make(request):
    return MAKERS[request.param]


def epochs(sampler, number):
    return [list(sampler) for _ in range(number)]


def test_is_a_sampler_whose_epochs_have_its_length(make):
    assert isinstance(make(), Sampler)
    assert [len(epoch) for epoch in epochs(make(), 3)] == [len(make())] * 3


def test_draws_row_numbers(make):
    assert all(type(row) is int and 0 <= row < 11 for epoch in epochs(make(), 3) for row in epoch)


def test_draws_the_same_again(make):
    assert epochs(make(), 3) == epochs(make(), 3)


def test_goes_on_after_any_draw(make):
    """Also exactly at an epoch's end, and a second time."""
    size = len(make())
    whole = [row for epoch in epochs(make(), 5) for row in epoch]
    for drawn in range(3 * size + 1):
        first = make()
        rows = []
        while len(rows) < drawn:
            rows += islice(iter(first), drawn - len(rows))
        assert rows == whole[:drawn]
        state = json.loads(json.dumps(first.state_dict()))
        again = make()
        again.load_state_dict(state)
        assert again.state_dict() == state
        rest = list(again)
        assert len(rest) == size - drawn % size, "what is left of the epoch"
        assert rest == whole[drawn : drawn + len(rest)]
        third = make()
        third.load_state_dict(json.loads(json.dumps(again.state_dict())))
        assert list(third) == whole[drawn + len(rest) : drawn + len(rest) + size]


def test_goes_on_in_a_second_iterator(make):
    sampler, whole = make(), list(make())
    assert list(islice(iter(sampler), 1)) + list(sampler) in (whole, whole + epochs(make(), 2)[1])
