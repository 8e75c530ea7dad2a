"""B42: what mixing weights mean, and which are refused."""

from itertools import islice

import numpy as np
import pytest

from burnish.data.samplers import DataMixingSampler
from burnish.errors import DataError

LENGTHS = [10, 1000]


def make(weights, *, lengths=LENGTHS, seed=42):
    return DataMixingSampler(range(sum(lengths)), lengths=lengths, weights=weights, seed=seed)


def draws(sampler, number):
    rows = []
    while len(rows) < number:
        rows += islice(iter(sampler), number - len(rows))
    return rows


def test_weights_are_relative():
    assert draws(make([8, 2]), 3000) == draws(make([0.8, 0.2]), 3000) == draws(make([0.4, 0.1]), 3000)


@pytest.mark.parametrize(("weights", "share"), [([1, 1], 0.5), ([8, 2], 0.8), ([0.3, 0.6], 1 / 3), ([1, 999], 0.001)])
def test_shares_over_ten_thousand_draws(weights, share):
    rows = np.array(draws(make(weights), 10_000))
    assert abs((rows < 10).mean() - share) <= 1e-4


def test_epochs_differ_and_seeds_decide():
    sampler = make([1, 1])
    first, second = list(sampler), list(sampler)
    assert len(first) == len(second) == 1010
    assert first != second
    assert first == list(make([1, 1])) != list(make([1, 1], seed=1))


@pytest.mark.parametrize("weights", [[0, 1], [-1, 2], [float("nan"), 1], [float("inf"), 1], [True, 1], ["1", 1]])
def test_numbers_that_are_no_weights(weights):
    with pytest.raises(DataError, match="is no number > 0"):
        make(weights)


@pytest.mark.parametrize("weights", [[1, 1, 1], [1], [], "[0.8,0.2]"])
def test_weights_that_do_not_fit_the_sources(weights):
    with pytest.raises(DataError, match="for 2 sources"):
        make(weights)


def test_a_source_without_rows_is_named():
    with pytest.raises(DataError, match="source 1: has no rows"):
        make([1, 1], lengths=[10, 0])


def test_lengths_that_are_not_the_rows():
    with pytest.raises(DataError, match=r"\[10, 5\] are not the 20 rows"):
        DataMixingSampler(range(20), lengths=[10, 5], weights=[1, 1])
