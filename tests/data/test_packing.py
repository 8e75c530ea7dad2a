"""Plans: every position once, whole, within the capacity, equal numbers of micro-batches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.packing import Layout, plan_bins, plan_micro_batches


def placed(plans):
    return sorted(p for plan in plans for micro_batch in plan for row in micro_batch for p in row)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=60), st.integers(1, 5), st.sampled_from([1, 4]))
def test_bins_place_every_example_once_and_overflow_no_row(lengths, ranks, multiple):
    plans = plan_bins(lengths, capacity=32, layout=Layout(data_size=ranks, micro_batch_multiple=multiple))
    assert placed(plans) == list(range(len(lengths)))
    assert all(sum(lengths[p] for p in row) <= 32 for plan in plans for (row,) in plan)
    assert len({len(plan) for plan in plans}) == 1
    assert len(plans[0]) % multiple == 0


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 5), st.booleans())
def test_micro_batches_hold_at_most_their_size(num_rows, size, ranks, share_row):
    plans = plan_micro_batches([3] * num_rows, micro_batch_size=size, share_row=share_row, layout=Layout(0, ranks))
    assert placed(plans) == list(range(num_rows))
    assert len({len(plan) for plan in plans}) == 1
    for micro_batch in (m for plan in plans for m in plan):
        assert sum(len(row) for row in micro_batch) <= size
        assert len(micro_batch) == 1 if share_row else all(len(row) <= 1 for row in micro_batch)


@pytest.mark.parametrize(("lengths", "bins"), [([7] * 8, 8), ([8, 8, 1], 3), ([3, 5, 4, 4], 2)])
def test_number_of_bins(lengths, bins):
    (plan,) = plan_bins(lengths, capacity=8, layout=Layout())
    assert len(plan) == bins


def test_segments_are_padded_to_their_multiple_within_the_capacity():
    (plan,) = plan_bins([5, 5, 5], capacity=16, layout=Layout(segment_multiple=8))
    assert sorted(len(row) for (row,) in plan) == [1, 2]
