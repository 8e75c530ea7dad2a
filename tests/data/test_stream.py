"""The path of a row from store to batch: once an epoch, next token as label, resumable anywhere."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.batch import IGNORE
from burnish.data.packing import Layout
from burnish.data.samplers import DataMixingSampler, RandomSampler, SequentialSampler
from burnish.data.stream import EvalBatches
from burnish.errors import DataError
from tests.train.fakes import make_store, make_stream


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_together_hold_each_target_once(ranks):
    store = make_store()
    streams = [make_stream(store, layout=Layout(rank, ranks), batch_size=8) for rank in range(ranks)]
    for batches in zip(*(islice(stream, 12) for stream in streams), strict=True):
        seen = sum(int((m.labels != IGNORE).sum()) for b in batches for m in b.micro_batches)
        assert {b.num_targets for b in batches} == {seen}
        assert len({b.row_numbers for b in batches}) == 1
        assert len({len(b.micro_batches) for b in batches}) == 1


def test_labels_are_the_next_token_of_the_same_example():
    for batch in islice(make_stream(make_store()), 5):
        for m in batch.micro_batches:
            r, c = np.nonzero(m.labels != IGNORE)
            assert (m.segment_ids[r, c] == m.segment_ids[r, c + 1]).all()
            assert (m.labels[r, c] == m.input_ids[r, c + 1]).all()


def test_an_epoch_draws_every_row_once_and_its_last_batch_is_short():
    stream = make_stream(make_store(37), batch_size=8)
    assert stream.steps_per_epoch == 5
    batches = list(islice(stream, 10))
    for epoch in (batches[:5], batches[5:]):
        assert sorted(r for b in epoch for r in b.row_numbers) == list(range(37))
        assert [len(b.row_numbers) for b in epoch] == [8, 8, 8, 8, 5]
        assert [b.ends_epoch for b in epoch] == [False, False, False, False, True]
    assert batches[0].row_numbers != batches[5].row_numbers
    assert [b.step for b in batches] == list(range(1, 11))


@pytest.mark.parametrize("num_readers", [0, 1, 3])
@pytest.mark.parametrize("stop", [1, 5, 7, 10, 13])
def test_resume_continues_with_the_very_next_batch(stop, num_readers):
    store = make_store()
    whole = list(islice(make_stream(store, batch_size=8), 16))
    first = list(islice(make_stream(store, batch_size=8, num_readers=num_readers), stop))
    again = make_stream(store, batch_size=8, num_readers=num_readers)
    again.resume(first[-1].cursor)
    for expected, got in zip(whole[stop:], islice(again, 16 - stop), strict=True):
        assert (expected.step, expected.row_numbers, expected.cursor) == (got.step, got.row_numbers, got.cursor)
        for a, b in zip(expected.micro_batches, got.micro_batches, strict=True):
            assert (a.input_ids == b.input_ids).all()
            assert (a.labels == b.labels).all()


class Written:
    """A sampler as users write them: state in two numbers, moved on after its last row."""

    def __init__(self, num_rows, *, extra=0):
        self.num_rows, self.extra, self.epoch, self.next = num_rows, extra, 0, 0

    def __len__(self):
        return self.num_rows + self.extra

    def __iter__(self):
        for position in range(self.next, self.num_rows):
            self.next = position + 1
            yield (position + self.epoch) % self.num_rows
        self.next, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state):
        self.epoch, self.next = state["epoch"], state["next"]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_a_sampler_that_moves_on_after_its_last_row(stop):
    whole = [b.row_numbers for b in islice(make_stream(make_store(4), batch_size=2, sampler=Written(4)), 8)]
    assert whole == [(0, 1), (2, 3), (1, 2), (3, 0), (2, 3), (0, 1), (3, 0), (1, 2)]
    first = list(islice(make_stream(make_store(4), batch_size=2, sampler=Written(4)), stop))
    again = make_stream(make_store(4), batch_size=2, sampler=Written(4))
    again.resume(first[-1].cursor)
    assert [b.row_numbers for b in islice(again, 8 - stop)] == whole[stop:]


def test_a_sampler_that_yields_less_than_it_says_still_ends_its_epochs():
    drawn = list(islice(make_stream(make_store(4), batch_size=3, sampler=Written(4, extra=5)), 4))
    assert [b.row_numbers for b in drawn] == [(0, 1, 2), (3,), (1, 2, 3), (0,)]


def test_a_sampler_without_rows_is_an_error_not_a_hang():
    with pytest.raises(DataError, match="two epochs in a row drew no row"):
        next(iter(make_stream(make_store(4), sampler=Written(0, extra=3))))
    with pytest.raises(DataError, match="length of 0"):
        make_stream(make_store(4), sampler=Written(0))


@pytest.mark.parametrize("num_readers", [0, 2])
def test_fewer_rows_than_a_batch_give_one_short_batch_an_epoch(num_readers):
    stream = make_stream(make_store(3), batch_size=8, sampler=SequentialSampler(3), num_readers=num_readers)
    assert stream.steps_per_epoch == 1
    assert [b.row_numbers for b in islice(stream, 2)] == [(0, 1, 2), (0, 1, 2)]


class Own(SequentialSampler):
    """A user's: draws ``rows``, and its state is the live list of what it has drawn."""

    def __init__(self, rows):
        super().__init__(len(rows))
        self._rows = rows
        self._seen = []

    def __iter__(self):
        for row in self._rows:
            self._seen.append(row)
            yield row

    def state_dict(self):
        return {"seen": self._seen}


@pytest.mark.parametrize("num_readers", [0, 3])
def test_a_state_travels_with_its_batch_also_when_the_sampler_changes_it_later(num_readers):
    stream = make_stream(make_store(6), batch_size=2, num_readers=num_readers, sampler=Own([5, 3, 1, 0, 2, 4]))
    seen = [batch.cursor["sampler"]["seen"] for batch in list(islice(stream, 3))]
    assert seen == [[5, 3], [5, 3, 1, 0], [5, 3, 1, 0, 2, 4]]


@pytest.mark.parametrize(("rows", "found"), [([0, 6], 6), ([-1, 0], -1), ([99], 99)])
def test_a_row_that_is_not_there_is_named(rows, found):
    with pytest.raises(DataError, match=f"drew row {found} of 6 rows"):
        next(iter(make_stream(make_store(6), batch_size=2, sampler=Own(rows))))


def test_half_a_row_is_no_row():
    with pytest.raises(TypeError, match="float"):
        next(iter(make_stream(make_store(6), sampler=Own([0.5]))))


def test_a_state_that_no_checkpoint_could_hold_is_found_in_the_first_step():
    sampler = Own([np.int64(0)])
    with pytest.raises(DataError, match="its state is not JSON-ready"):
        next(iter(make_stream(make_store(6), sampler=sampler)))


def steps_in_tokens(rows, lengths, budget):
    """The rows of an epoch's steps, from the rule: as many as fit, and at least one."""
    steps, total = [], budget
    for row in rows:
        if total + lengths[row] > budget:
            steps.append([])
            total = 0
        steps[-1].append(row)
        total += lengths[row]
    return [tuple(step) for step in steps]


@given(st.integers(1, 30), st.integers(1, 60), st.integers(0, 5))
@settings(max_examples=60)
def test_a_step_holds_as_many_rows_as_its_tokens_allow(num_rows, budget, seed):
    store = make_store(num_rows, seed=seed)
    order = RandomSampler(num_rows, seed=7)
    epochs = [steps_in_tokens(list(order), store.lengths, budget) for _ in range(3)]
    stream = make_stream(store, batch_tokens=budget)
    assert stream.steps_per_epoch is None
    draws = list(islice(stream.draws(), sum(map(len, epochs))))
    assert [draw.rows for draw in draws] == [step for epoch in epochs for step in epoch]
    assert [draw.ends_epoch for draw in draws] == [step is epoch[-1] for epoch in epochs for step in epoch]


SAMPLERS = {
    "random": lambda: RandomSampler(12, seed=7),
    "sequential": lambda: SequentialSampler(12),
    "mixing": lambda: DataMixingSampler(range(12), lengths=[3, 9], weights=[1, 1]),
    "custom": lambda: Written(12),
}


@pytest.mark.parametrize("num_readers", [0, 2])
@pytest.mark.parametrize("budget", [1, 25, 40, 1000])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_step_of_tokens_is_found_again_from_any_cursor(sampler, budget, num_readers):
    def stream():
        return make_stream(
            make_store(12, seed=3), batch_tokens=budget, num_readers=num_readers, sampler=SAMPLERS[sampler]()
        )

    whole = [(b.step, b.row_numbers, b.cursor) for b in islice(stream(), 30)]
    assert any(cursor["held"] is not None for _, _, cursor in whole) is (budget in (25, 40))
    for at in range(25):
        again = stream()
        again.resume(whole[at][2])
        assert [(b.step, b.row_numbers, b.cursor) for b in islice(again, 4)] == whole[at + 1 : at + 5]


def test_a_row_that_waits_for_the_next_step_is_in_no_other():
    stream = make_stream(make_store(20), batch_tokens=30, num_readers=2)
    epoch = []
    for batch in stream:
        epoch += batch.row_numbers
        if batch.ends_epoch:
            break
    assert sorted(epoch) == list(range(20))


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_of_one_length_on_all_ranks(ranks):
    store = make_store(11)
    streams = [
        make_stream(store, batch_size=11, layout=Layout(rank, ranks, segment_multiple=8, row_multiple=4, equal_lengths=True))
        for rank in range(ranks)
    ]  # fmt: skip
    shapes = {m.input_ids.shape for stream in streams for m in next(iter(stream)).micro_batches}
    assert len(shapes) == 1
    rows, length = shapes.pop()
    assert (rows, length % 8) == (1, 0)


def test_an_evaluation_is_in_steps_of_tokens_too():
    builder = make_stream(make_store(9, seed=2)).builder
    lengths = builder.store.lengths
    for _ in range(2):
        batches = list(EvalBatches(builder, batch_size=4, batch_tokens=30))
        assert [b.row_numbers for b in batches] == steps_in_tokens(range(9), lengths, 30)
        assert {(b.step, b.ends_epoch) for b in batches} == {(0, False)}
    assert [len(b.row_numbers) for b in EvalBatches(builder, batch_size=4)] == [4, 4, 1]
