"""Plans: every position once, whole, within the capacity; ranks with equal numbers of micro-batches and equal costs."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.packing import Layout, best_fit, plan_bins, plan_micro_batches

LENGTHS = st.lists(st.integers(1, 32), min_size=1, max_size=60)
LAYOUTS = st.builds(
    Layout,
    data_size=st.integers(1, 5),
    micro_batch_multiple=st.sampled_from([1, 4]),
    segment_multiple=st.sampled_from([1, 2, 8]),
)


def placed(plans):
    return sorted(p for plan in plans for micro_batch in plan for row in micro_batch for p in row)


def lognormal(number, *, longest=4096, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(5.2, 1.0, number).astype(np.int64), 1, longest)


def quadratic(lengths):
    return lengths.astype(float) ** 2


def of_a_model(lengths):
    """Its attention costs as much as its weights at 30,000 tokens."""
    return lengths + quadratic(lengths) / 30_000


def seconds(action):
    """Of this thread alone, at best: other processes share the machine."""
    taken = []
    for _ in range(3):
        began = time.thread_time()
        action()
        taken.append(time.thread_time() - began)
    return min(taken)


@settings(max_examples=150)
@given(LENGTHS, LAYOUTS)
def test_bins_place_every_example_once_and_overflow_no_row(lengths, layout):
    plans = plan_bins(lengths, capacity=32, layout=layout, cost=quadratic)
    assert placed(plans) == list(range(len(lengths)))
    assert all(sum(lengths[p] for p in row) <= 32 for plan in plans for (row,) in plan)
    assert {len(plan) for plan in plans} == {len(plans[0])}
    assert len(plans) == layout.data_size
    assert len(plans[0]) % layout.micro_batch_multiple == 0


@settings(max_examples=150)
@given(LENGTHS, LAYOUTS, st.integers(1, 8), st.booleans())
def test_micro_batches_hold_at_most_their_size(lengths, layout, size, share_row):
    plans = plan_micro_batches(lengths, micro_batch_size=size, share_row=share_row, layout=layout, cost=quadratic)
    assert placed(plans) == list(range(len(lengths)))
    fewest = -(-len(lengths) // (size * layout.data_size))
    assert {len(plan) for plan in plans} == {-(-fewest // layout.micro_batch_multiple) * layout.micro_batch_multiple}
    for micro_batch in (m for plan in plans for m in plan):
        assert sum(len(row) for row in micro_batch) <= size
        assert len(micro_batch) == 1 if share_row else all(len(row) <= 1 for row in micro_batch)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=120), st.integers(50, 120))
def test_whole_lengths_are_placed_as_one_example_after_the_other_would_be(lengths, capacity):
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    positions, starts = best_fit(np.array(lengths), capacity=capacity)
    rows = [positions[start:stop].tolist() for start, stop in pairwise(starts)]
    assert sorted(capacity - sum(lengths[p] for p in row) for row in rows) == sorted(rooms)
    assert sorted(positions.tolist()) == list(range(len(lengths)))
    assert all(row == sorted(row) for row in rows)


def test_a_million_lengths_are_packed_full_in_a_blink():
    lengths = lognormal(10**6)
    positions, starts = best_fit(lengths, capacity=4096)
    filled = np.add.reduceat(lengths[positions], starts[:-1])
    assert filled.max() <= 4096
    assert filled.mean() > 0.999 * 4096
    assert np.bincount(positions, minlength=10**6).tolist() == [1] * 10**6
    assert seconds(lambda: best_fit(lengths, capacity=4096)) < 0.3


def test_a_step_of_a_thousand_ranks_is_planned_in_a_blink():
    lengths, layout = lognormal(8192), Layout(data_size=1024)
    assert seconds(lambda: plan_bins(lengths, capacity=4096, layout=layout, cost=quadratic)) < 0.05
    micro_batches = {"micro_batch_size": 2, "share_row": True, "layout": layout, "cost": quadratic}
    assert seconds(lambda: plan_micro_batches(lengths, **micro_batches)) < 0.05


def waiting(plans, costs):
    """Share of the time that ranks wait for the slowest, which they do after every micro-batch."""
    spent = np.array([[sum(costs[p] for row in m for p in row) for m in plan] for plan in plans])
    return 1 - spent.mean(axis=0).sum() / spent.max(axis=0).sum()


@pytest.mark.parametrize("capacity", [4096, 16384])
@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_ranks_cost_alike(ranks, capacity):
    lengths = lognormal(2048)
    plans = plan_bins(lengths, capacity=capacity, layout=Layout(data_size=ranks), cost=of_a_model)
    assert waiting(plans, of_a_model(lengths)) < 0.04


def test_it_is_the_cost_that_is_balanced():
    """A long example costs more than many short ones of as many tokens."""
    lengths, layout = [64, 64, *[8] * 16], Layout(data_size=2)
    by_cost = plan_bins(lengths, capacity=256, layout=layout, cost=quadratic)
    assert [sorted(lengths[p] for (row,) in plan for p in row) for plan in by_cost] == [[8] * 8 + [64]] * 2
    lengths = [64, *[8] * 24]
    loads = [sum(quadratic(np.array([lengths[p] for (row,) in plan for p in row]))) for plan in
             plan_bins(lengths, capacity=256, layout=layout, cost=quadratic)]  # fmt: skip
    assert loads == [64**2, 24 * 8**2]


def test_room_that_no_bin_needs_is_used_to_wait_less():
    """Nine full rows on eight ranks are sixteen half-full ones, not a second micro-batch for one rank alone."""
    plans = plan_bins([10] * 72, capacity=80, layout=Layout(data_size=8))
    assert [[len(row) for (row,) in plan] for plan in plans] == [[5, 4]] * 8


@pytest.mark.parametrize(("share_row", "limit"), [(True, 0.05), (False, 0.25)])
def test_micro_batches_of_all_ranks_cost_alike(share_row, limit):
    lengths = lognormal(512)
    plans = plan_micro_batches(
        lengths, micro_batch_size=8, share_row=share_row, layout=Layout(data_size=4), cost=of_a_model
    )
    assert waiting(plans, of_a_model(lengths)) < limit


def test_no_rank_gets_the_costliest_of_every_round():
    lengths = list(range(1, 41))
    plans = plan_micro_batches(lengths, micro_batch_size=1, share_row=False, layout=Layout(data_size=4))
    rounds = [[sum(lengths[p] for (p,) in m) for m in plan] for plan in plans]
    assert {max(at_once) - min(at_once) for at_once in zip(*rounds, strict=True)} == {3}
    assert np.ptp([sum(costs) for costs in rounds]) <= 3


def test_padded_micro_batches_hold_examples_of_like_length():
    ((first, second, third),) = plan_micro_batches(
        [9, 2, 8, 3, 1, 7], micro_batch_size=2, share_row=False, layout=Layout()
    )
    assert (first, second, third) == (((2,), (0,)), ((3,), (5,)), ((4,), (1,)))


def test_ranks_without_examples_get_fillers():
    for plans in (
        plan_bins([5, 5], capacity=8, layout=Layout(data_size=3, micro_batch_multiple=2)),
        plan_micro_batches([5, 5], micro_batch_size=4, share_row=True, layout=Layout(data_size=3, micro_batch_multiple=2)),
    ):  # fmt: skip
        assert sorted(plans) == [(((),), ((),)), (((0,),), ((),)), (((1,),), ((),))]


@pytest.mark.parametrize(("lengths", "bins"), [([5, 5, 5], [1, 2]), ([16, 9, 1], [1, 1, 1]), ([8, 8, 8], [1, 2])])
def test_segments_are_padded_to_their_multiple_within_the_capacity(lengths, bins):
    (plan,) = plan_bins(lengths, capacity=16, layout=Layout(segment_multiple=8))
    assert sorted(len(row) for (row,) in plan) == bins


def test_an_example_longer_than_the_multiples_of_a_row_is_alone():
    (plan,) = plan_bins([15, 1, 7, 8], capacity=15, layout=Layout(segment_multiple=8))
    assert sorted(plan) == [((0,),), ((1,),), ((2,),), ((3,),)]
    (plan,) = plan_bins([3, 2, 1], capacity=5, layout=Layout(segment_multiple=8))
    assert sorted(plan) == [((0,),), ((1,),), ((2,),)]


def test_an_example_that_fits_no_row_is_our_own_mistake():
    with pytest.raises(AssertionError, match="9 tokens does not fit a row of 8"):
        plan_bins([9, 1], capacity=8, layout=Layout())
