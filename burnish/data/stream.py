"""Draw, plan, read, collate: a store becomes batches, ahead of the trainer and exactly resumable.

Its rule: the order is decided when rows are drawn, in one thread; readers only fill in the arrays.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import index
from typing import Any, TypeAlias

from burnish.data.batch import Batch, collate
from burnish.data.example import IntArray
from burnish.data.mixture import Mixture
from burnish.data.packing import Layout, RankPlan, round_up
from burnish.data.samplers import Sampler, Seekable, SequentialSampler
from burnish.errors import DataError

Planner: TypeAlias = Callable[[IntArray, IntArray], tuple[RankPlan, ...]]
"""Lengths and image patches of the drawn examples -> the plan of every rank."""

_ROWS = "yield numbers from 0 to one less than the rows of the dataset"


@dataclass(frozen=True, slots=True)
class Draw:
    """The rows of one step, drawn but not read."""

    rows: tuple[int, ...]
    step: int
    ends_epoch: bool
    cursor: dict[str, Any]


class BatchBuilder:
    """Drawn rows become this rank's part of a batch. Every rank plans all ranks' rows and reads only its own."""

    def __init__(self, store: Mixture, *, planner: Planner, layout: Layout, pad_id: int) -> None:
        self.store = store
        self._planner = planner
        self._layout = layout
        self._pad_id = pad_id

    def plan(self, rows: Sequence[int]) -> tuple[RankPlan, ...]:
        """The plan of every rank for these rows; nothing is read."""
        return self._planner(self.store.lengths[list(rows)], self.store.num_patches[list(rows)])

    def build(self, draw: Draw) -> Batch:
        """Read and lay out what this rank needs of ``draw``."""
        rows = list(draw.rows)
        plans = self.plan(rows)
        plan = plans[self._layout.data_rank]
        wanted = sorted({position for micro_batch in plan for row in micro_batch for position in row})
        examples = {position: self.store[rows[position]] for position in wanted}
        sources = dict(enumerate(int(source) for source in self.store.source_of(rows)))
        lengths = self.store.lengths[rows]
        padded = round_up(lengths, self._layout.segment_multiple)
        longest = _longest_row(plans, padded.tolist()) if self._layout.equal_lengths else 0
        return Batch(
            micro_batches=tuple(
                collate(
                    examples,
                    micro_batch,
                    sources=sources,
                    pad_id=self._pad_id,
                    layout=self._layout,
                    length=longest,
                )
                for micro_batch in plan
            ),
            num_targets=int(self.store.target_counts[rows].sum()),
            num_tokens=int(lengths.sum()),
            row_numbers=draw.rows,
            step=draw.step,
            ends_epoch=draw.ends_epoch,
            cursor=draw.cursor,
        )


class BatchStream:
    """An endless iterator of training batches; the last one of an epoch may be short.

    Args:
        builder: reads and lays out what is drawn.
        sampler: draws the rows.
        batch_size: rows a step.
        batch_tokens: tokens a step at most, instead. A step ends before the row that would pass it, which begins the
            next one; a row that is longer by itself is a step by itself.
        num_readers: threads that read ahead; 0 reads when a batch is asked for.

    Raises:
        DataError: the sampler's epochs would have no step.
    """

    def __init__(
        self,
        builder: BatchBuilder,
        *,
        sampler: Sampler,
        batch_size: int,
        batch_tokens: int | None = None,
        num_readers: int = 0,
    ) -> None:
        if len(sampler) == 0:
            raise DataError("sampler", "has a length of 0, so that an epoch would have no step", fix=_ROWS)
        self.builder = builder
        self._sampler = sampler
        self._batch_size = batch_size
        self._batch_tokens = batch_tokens
        self._num_readers = num_readers
        self._step = 0
        self._epoch = 0
        self._position = 0
        self._held: int | None = None

    @property
    def draws_per_epoch(self) -> int:
        """Rows an epoch draws."""
        return len(self._sampler)

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches an epoch: ceil(draws / batch_size); None where a step has no fixed number of rows."""
        return -(-len(self._sampler) // self._batch_size) if self._batch_tokens is None else None

    def resume(self, cursor: Mapping[str, Any]) -> None:
        """Continue after the batch whose ``cursor`` this is."""
        self._step, self._epoch, self._position = cursor["step"], cursor["epoch"], cursor["position"]
        self._held = cursor["held"]
        self._sampler.load_state_dict(cursor["sampler"])

    def seek(self, step: int) -> None:
        """Continue after ``step`` steps from the first, undrawn: one of our samplers, and a fixed number of rows a step."""
        steps_per_epoch = self.steps_per_epoch
        assert steps_per_epoch is not None
        assert isinstance(self._sampler, Seekable)
        self._step, self._held = step, None
        self._epoch, done = divmod(step, steps_per_epoch)
        self._position = done * self._batch_size
        self._sampler.seek(self._epoch * len(self._sampler) + self._position)

    @property
    def cursor(self) -> dict[str, Any]:
        """Where it stands, JSON-ready; ``resume`` takes it."""
        return {
            "step": self._step,
            "epoch": self._epoch,
            "position": self._position,
            "held": self._held,
            "sampler": _snapshot(self._sampler.state_dict()),
        }

    def draws(self) -> Iterator[Draw]:
        """The rows of each step from here on, unread."""
        empty_epochs = 0
        while empty_epochs < 2:
            # One empty epoch is legal: a sampler restored at its very end has nothing left of it.
            empty_epochs += 1
            iterator = iter(self._sampler)
            while rows := self._take(iterator):
                empty_epochs = 0
                yield self._draw(rows)
            if self._position:
                self._next_epoch()
        raise DataError("sampler", "two epochs in a row drew no row", fix="yield at least one row number an epoch")

    def __iter__(self) -> Iterator[Batch]:
        if self._num_readers == 0:
            yield from map(self.builder.build, self.draws())
            return
        pending: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(self._num_readers, thread_name_prefix="reader") as readers:
            draws = self.draws()
            try:
                while True:
                    while len(pending) <= self._num_readers:
                        pending.append(readers.submit(self.builder.build, next(draws)))
                    yield pending.popleft().result()
            finally:
                readers.shutdown(cancel_futures=True)

    def _take(self, iterator: Iterator[int]) -> tuple[int, ...]:
        """The rows of the next step; none at the end of an epoch."""
        budget = self._batch_tokens or self._batch_size
        rows: list[int] = []
        total = 0
        while total < budget and self._position + len(rows) < len(self._sampler):
            drawn = next(iterator, None) if self._held is None else self._held
            if drawn is None:
                break
            row, self._held = index(drawn), None
            size = self._size(row)
            if rows and total + size > budget:
                self._held = row
                break
            rows.append(row)
            total += size
        return tuple(rows)

    def _size(self, row: int) -> int:
        if not 0 <= row < len(self.builder.store):
            raise DataError("sampler", f"drew row {row} of {len(self.builder.store)} rows", fix=_ROWS)
        return int(self.builder.store.lengths[row]) if self._batch_tokens else 1

    def _draw(self, rows: tuple[int, ...]) -> Draw:
        self._step += 1
        self._position += len(rows)
        ends_epoch = self._position >= len(self._sampler)
        if ends_epoch:
            self._next_epoch()
        return Draw(rows, step=self._step, ends_epoch=ends_epoch, cursor=self.cursor)

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._position = 0


class EvalBatches:
    """The rows of an evaluation set in stored order, once an iteration, each row in one batch."""

    def __init__(self, builder: BatchBuilder, *, batch_size: int, batch_tokens: int | None = None) -> None:
        self._builder = builder
        self._size: dict[str, Any] = {"batch_size": batch_size, "batch_tokens": batch_tokens}

    def __iter__(self) -> Iterator[Batch]:
        stream = BatchStream(self._builder, sampler=SequentialSampler(len(self._builder.store)), **self._size)
        for draw in stream.draws():
            yield self._builder.build(replace(draw, step=0, ends_epoch=False, cursor={}))
            if draw.ends_epoch:
                return


def _snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` as a checkpoint gives it back; what is drawn ahead does not change it."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        fix = "return numbers, text, lists and dicts from its state_dict"
        raise DataError("sampler", f"its state is not JSON-ready: {error}", fix=fix) from error
    return copy


def _longest_row(plans: Sequence[RankPlan], lengths: Sequence[int]) -> int:
    rows = (row for plan in plans for micro_batch in plan for row in micro_batch)
    return max(sum(lengths[position] for position in row) for row in rows)
