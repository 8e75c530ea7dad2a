import time
import tracemalloc
from itertools import islice, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.permutation import permuted
from burnish.data.samplers import RandomSampler


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_every_row_once(size, seed, epoch):
    rows = permuted(np.arange(size), size=size, key=(seed, epoch))
    assert sorted(rows.tolist()) == list(range(size))
    some = np.array([size - 1, 0, size // 2])
    assert permuted(some, size=size, key=(seed, epoch)).tolist() == rows[some].tolist()


def test_orders_are_fixed_for_all_time():
    """A resumed run needs the order that it began with: these numbers may never change."""
    assert permuted(np.arange(10), size=10, key=(42, 0, 0)).tolist() == ORDER_10
    assert permuted(np.arange(5), size=5000, key=(42, 0, 0)).tolist() == ORDER_5000
    assert permuted(np.arange(5) * 10**8, size=10**9, key=(42, 0, 1)).tolist() == ORDER_BILLION


ORDER_10 = [0, 3, 6, 9, 4, 2, 5, 7, 1, 8]
ORDER_5000 = [4541, 1828, 3217, 3695, 260]
ORDER_BILLION = [899356947, 351891426, 783786222, 825663729, 734193524]


@pytest.mark.parametrize("size", [2, 3, 5, 10, 33])
def test_every_row_stands_everywhere_equally_often(size):
    keys = 3000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), permuted(np.arange(size), size=size, key=(7, key))] += 1
    degrees = (size - 1) ** 2
    chi_square = ((counts - keys / size) ** 2 / (keys / size)).sum()
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("size", [1000, 4096, 100_003])
def test_the_start_of_an_epoch_is_a_fair_sample(size):
    """Draws fall evenly on 20 equal parts of the rows, and neighbours in the order are no neighbours in the store."""
    rows = permuted(np.arange(1000), size=size, key=(1, 0))
    counts = np.bincount(rows * 20 // size, minlength=20)
    assert ((counts - 50) ** 2 / 50).sum() < 19 + 4 * np.sqrt(38)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.13


@pytest.mark.parametrize("size", [1025, 3000])
def test_a_position_falls_everywhere_over_the_epochs(size):
    first = np.concatenate([permuted(np.array([0, 1]), size=size, key=(5, epoch)) for epoch in range(1000)])
    counts = np.bincount(first * 20 // size, minlength=20)
    assert ((counts - 100) ** 2 / 100).sum() < 19 + 4 * np.sqrt(38)


def test_two_epochs_and_two_seeds_share_no_order():
    orders = {tuple(permuted(np.arange(100), size=100, key=(s, e)).tolist()) for s in range(5) for e in range(5)}
    assert len(orders) == 25


def test_a_billion_rows_take_no_longer_than_a_thousand():
    began = time.perf_counter()
    rows = permuted(np.arange(4096) + 999_000_000, size=10**9, key=(0, 0))
    assert time.perf_counter() - began < 0.5
    assert len(set(rows.tolist())) == 4096


@pytest.mark.parametrize("size", [3, 4])
def test_every_order_comes_equally_often(size):
    orders = {order: 0 for order in permutations(range(size))}
    keys = 200 * len(orders)
    for key in range(keys):
        orders[tuple(permuted(np.arange(size), size=size, key=(3, key)).tolist())] += 1
    chi_square = sum((count - 200) ** 2 / 200 for count in orders.values())
    assert abs(chi_square - (len(orders) - 1)) < 4 * np.sqrt(2 * len(orders))


def test_rows_that_are_neighbours_fall_on_all_pairs_of_places():
    """Through the network, not the table of a few: where row 1 stands says nothing of where row 2 does."""
    size, keys, parts = 2000, 3000, 10
    pairs = np.zeros((parts, parts))
    for key in range(keys):
        first, second = permuted(np.array([700, 701]), size=size, key=(11, key)) * parts // size
        pairs[first, second] += 1
    chi_square = ((pairs - keys / parts**2) ** 2 / (keys / parts**2)).sum()
    assert abs(chi_square - parts**2) < 4 * np.sqrt(2 * parts**2)


def test_a_billion_rows_take_no_memory_and_no_time_to_resume():
    def draw(start):
        sampler = RandomSampler(10**9, seed=1)
        sampler.load_state_dict({"drawn": start})
        return list(islice(sampler, 3000))

    tracemalloc.start()
    began = time.thread_time()
    whole, late = draw(0), draw(10**9 - 3000)
    seconds, peak = time.thread_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (whole[2000:], late[2900:]) == (draw(2000)[:1000], draw(10**9 - 100)[:100])
    assert len(set(whole + late)) == 6000
    assert peak < 4e6
    assert seconds < 1
