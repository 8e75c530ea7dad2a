import json
import logging
import sys
import types
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.samplers import DataMixingSampler, RandomSampler, SequentialSampler, load_custom_sampler
from burnish.errors import DataError


def draw(sampler, number):
    """The next ``number`` draws, epoch after epoch."""
    rows = []
    while len(rows) < number:
        rows += islice(iter(sampler), number - len(rows))
    return rows


def test_random_draws_each_row_once_an_epoch_in_a_new_order():
    sampler = RandomSampler(100, seed=1)
    epochs = [list(sampler) for _ in range(4)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [list(RandomSampler(100, seed=1)), list(RandomSampler(100, seed=2))] != [epochs[0]] * 2
    assert list(RandomSampler(100, seed=1)) == epochs[0]


def test_sequential_draws_as_stored():
    sampler = SequentialSampler(3)
    assert [list(sampler), list(sampler)] == [[0, 1, 2]] * 2


SOURCES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=7)


@given(sources=SOURCES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_mixing_keeps_the_shares_in_every_window(sources, data):
    lengths, weights = [s[0] for s in sources], [s[1] for s in sources]
    rows = draw(DataMixingSampler(range(sum(lengths)), lengths=lengths, weights=weights), 400)
    starts = np.cumsum([0, *lengths])
    drawn = np.searchsorted(starts, rows, side="right") - 1
    counts = np.cumsum(np.eye(len(lengths))[drawn], axis=0)
    due = np.arange(1, 401)[:, None] * np.array(weights) / sum(weights)
    assert (np.abs(counts - due) < 1).all(), "after n draws each source had floor or ceil of its share"
    begin = data.draw(st.integers(0, 398))
    window = counts[-1] - counts[begin]
    assert (np.abs(window - due[-1] + due[begin]) < 2).all()


def test_mixing_uses_a_source_up_before_any_row_again():
    sampler = DataMixingSampler(range(17), lengths=[5, 12], weights=[3, 1])
    rows = draw(sampler, 400)
    small = [r for r in rows if r < 5]
    large = [r for r in rows if r >= 5]
    passes = [tuple(small[i : i + 5]) for i in range(0, 300, 5)]
    assert all(sorted(p) == [0, 1, 2, 3, 4] for p in passes)
    assert len(set(passes)) > 30, "reshuffled on every pass"
    assert all(sorted(large[i : i + 12]) == list(range(5, 17)) for i in range(0, 96, 12))


def test_mixing_epoch_has_as_many_draws_as_rows_and_epochs_differ():
    sampler = DataMixingSampler(range(110), lengths=[10, 100], weights=[1, 1])
    first, second = list(sampler), list(sampler)
    assert (len(first), len(second), len(sampler)) == (110, 110, 110)
    assert first != second
    assert first != list(DataMixingSampler(range(110), lengths=[10, 100], weights=[1, 1], seed=43))


def test_mixing_logs_the_passes(caplog):
    with caplog.at_level(logging.INFO, "burnish.data.samplers"):
        DataMixingSampler(range(1010), lengths=[10, 1000], weights=[0.8, 0.2])
    assert [r.getMessage() for r in caplog.records] == [
        "source 0: 10 rows, 80.0 % of the draws, passed 80.80 times an epoch",
        "source 1: 1000 rows, 20.0 % of the draws, passed 0.20 times an epoch",
    ]


def test_mixing_refuses_the_state_of_other_sources():
    state = DataMixingSampler(range(3), lengths=[1, 2], weights=[1, 1]).state_dict()
    with pytest.raises(DataError, match="of 2 sources, the data of 3"):
        DataMixingSampler(range(3), lengths=[1, 1, 1], weights=[1, 1, 1]).load_state_dict(state)


class Reversed:
    """A sampler as users write them."""

    def __init__(self, dataset, *, lengths=None, step=1):
        self.dataset, self.lengths, self.step, self.left = dataset, lengths, step, None

    def __iter__(self):
        self.left = self.left or list(range(0, len(self.dataset), self.step))
        while self.left:
            yield self.left.pop()

    def __len__(self):
        return len(range(0, len(self.dataset), self.step))

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


class WithoutState:
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(range(3))

    def __len__(self):
        return 3


class Forwards(DataMixingSampler):
    def __init__(self, dataset, **kwargs):
        super().__init__(dataset, weights=[1, 2], **kwargs)


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("toy_samplers")
    made.Reversed, made.WithoutState, made.Forwards = Reversed, WithoutState, Forwards
    monkeypatch.setitem(sys.modules, "toy_samplers", made)


@pytest.mark.usefixtures("module")
def test_custom_gets_the_lengths_of_several_sources():
    path, rows = "toy_samplers.Reversed", range(5)
    several = load_custom_sampler(path, dataset=rows, kwargs={"step": 2}, source_lengths=[2, 3])
    assert (list(several), several.lengths, several.dataset) == ([4, 2, 0], [2, 3], rows)
    assert load_custom_sampler(path, dataset=rows, kwargs={}, source_lengths=[5]).lengths is None
    own = load_custom_sampler(path, dataset=rows, kwargs={"lengths": [1, 4]}, source_lengths=[2, 3])
    assert own.lengths == [1, 4]
    forwarded = load_custom_sampler("toy_samplers.Forwards", dataset=rows, kwargs={}, source_lengths=[2, 3])
    assert sorted(list(forwarded)[:3])[0] < 2


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("path", "kwargs", "found"),
    [
        ("toy_samplers.Missing", {}, "KeyError"),
        ("no_such_module.Class", {}, "No module named"),
        ("Reversed", {}, "cannot be built"),
        ("toy_samplers.Reversed", {"stride": 2}, "stride"),
        ("toy_samplers.WithoutState", {}, "has no state_dict, load_state_dict"),
        ("toy_samplers.Reversed.__doc__", {}, "cannot be built"),
    ],
)
def test_custom_that_does_not_fit_is_named(path, kwargs, found):
    with pytest.raises(DataError, match=f"sampler_class_path: '{path}' .*{found}"):
        load_custom_sampler(path, dataset=range(5), kwargs=kwargs, source_lengths=[5])


def test_where_a_custom_one_is_looked_for_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        load_custom_sampler("nowhere.Sampler", dataset=range(5), kwargs={}, source_lengths=[5])
    assert f"of a class in {tmp_path} or an installed package" in error.value.fix


def test_states_are_json_and_small():
    for sampler in (
        RandomSampler(10**9, seed=1),
        DataMixingSampler(range(10**6), lengths=[10, 999990], weights=[1, 1]),
    ):
        draw(sampler, 100)
        assert len(json.dumps(sampler.state_dict())) < 40
