"""Draw, plan, read, collate: a store becomes batches, ahead of the trainer and exactly resumable.

Its rule: the order is decided when rows are drawn, in one thread; readers only fill in the arrays.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any, TypeAlias

from burnish.data.batch import Batch, collate
from burnish.data.mixture import Mixture
from burnish.data.packing import Layout, RankPlan
from burnish.data.samplers import Sampler
from burnish.errors import DataError

Planner: TypeAlias = Callable[[Sequence[int]], tuple[RankPlan, ...]]
"""Lengths of the drawn examples -> the plan of every rank."""

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
        return self._planner([int(length) for length in self.store.lengths[list(rows)]])

    def build(self, draw: Draw) -> Batch:
        """Read and lay out what this rank needs of ``draw``."""
        rows = list(draw.rows)
        plans = self.plan(rows)
        plan = plans[self._layout.data_rank]
        wanted = sorted({position for micro_batch in plan for row in micro_batch for position in row})
        examples = {position: self.store[rows[position]] for position in wanted}
        sources = dict(enumerate(int(source) for source in self.store.source_of(rows)))
        lengths = self.store.lengths[rows]
        return Batch(
            micro_batches=tuple(
                collate(
                    examples,
                    micro_batch,
                    sources=sources,
                    pad_id=self._pad_id,
                    layout=self._layout,
                    length=_longest_row(plans, lengths) if self._layout.equal_lengths else 0,
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
    """An endless iterator of training batches; the last one of an epoch may be short."""

    def __init__(self, builder: BatchBuilder, *, sampler: Sampler, batch_size: int, num_readers: int = 0) -> None:
        if len(sampler) == 0:
            raise DataError("sampler", "has a length of 0, so that an epoch would have no step", fix=_ROWS)
        self.builder = builder
        self._sampler = sampler
        self._batch_size = batch_size
        self._num_readers = num_readers
        self._step = 0
        self._epoch = 0
        self._position = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches an epoch: ceil(draws / batch_size)."""
        return -(-len(self._sampler) // self._batch_size)

    def resume(self, cursor: Mapping[str, Any]) -> None:
        """Continue after the batch whose ``cursor`` this is."""
        self._step, self._epoch, self._position = cursor["step"], cursor["epoch"], cursor["position"]
        self._sampler.load_state_dict(cursor["sampler"])

    def draws(self) -> Iterator[Draw]:
        """The rows of each step from here on, unread."""
        empty_epochs = 0
        while empty_epochs < 2:
            # One empty epoch is legal: a sampler restored at its very end has nothing left of it.
            empty_epochs += 1
            iterator = iter(self._sampler)
            while rows := tuple(index(row) for row in islice(iterator, self._batch_size)):
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

    def _draw(self, rows: tuple[int, ...]) -> Draw:
        num_rows = len(self.builder.store)
        if not 0 <= min(rows) <= max(rows) < num_rows:
            raise DataError("sampler", f"drew rows {min(rows)} to {max(rows)} of {num_rows} rows", fix=_ROWS)
        self._step += 1
        self._position += len(rows)
        ends_epoch = self._position >= len(self._sampler)
        state = _snapshot(self._sampler.state_dict())
        if ends_epoch:
            self._next_epoch()
        cursor = {"step": self._step, "epoch": self._epoch, "position": self._position, "sampler": state}
        return Draw(rows, step=self._step, ends_epoch=ends_epoch, cursor=cursor)

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._position = 0


class EvalBatches:
    """The rows of an evaluation set in stored order, once an iteration, each row in one batch."""

    def __init__(self, builder: BatchBuilder, *, batch_size: int) -> None:
        self._builder = builder
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[Batch]:
        num_rows = len(self._builder.store)
        for start in range(0, num_rows, self._batch_size):
            rows = tuple(range(start, min(start + self._batch_size, num_rows)))
            yield self._builder.build(Draw(rows, step=0, ends_epoch=False, cursor={}))


def _snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` as a checkpoint gives it back; what is drawn ahead does not change it."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        fix = "return numbers, text, lists and dicts from its state_dict"
        raise DataError("sampler", f"its state is not JSON-ready: {error}", fix=fix) from error
    return copy


def _longest_row(plans: Sequence[RankPlan], lengths: Any) -> int:
    rows = (row for plan in plans for micro_batch in plan for row in micro_batch)
    return max(sum(int(lengths[position]) for position in row) for row in rows)
