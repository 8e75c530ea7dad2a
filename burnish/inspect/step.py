"""A step's number becomes its rows: where each stands at its source, and where it lands. No device, no run's folder."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from burnish.assemble.data import build_stream, count_steps, open_train
from burnish.assemble.model import plan_layout, require_valid, world_size
from burnish.assemble.run import build_checkpointer
from burnish.backends.comm import alone
from burnish.config import SFTConfig
from burnish.data.packing import RankPlan
from burnish.data.store import Store
from burnish.data.stream import BatchStream, Draw
from burnish.errors import DataError
from burnish.inspect.rows import RowPlaces
from burnish.train.checkpoint import complete_checkpoints


@dataclass(frozen=True, slots=True)
class TracedRow:
    """An example of a step."""

    row: int
    """Its number over all sources in their order, as in ``burnish inspect rows row=N``."""
    source: str
    place: str
    """File and line or row at the source; of raw rows in the dataset itself."""
    tokens: int
    targets: int
    rank: int
    """The first of the ranks that share it."""
    micro_batch: int
    """Counted from 0 on its rank."""
    micro_batch_row: int
    """The row of the micro-batch that it lies in."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What one step of a run is made of."""

    step: int
    num_steps: int
    """Of the run."""
    epoch: int
    """Counted from 0."""
    rows: tuple[TracedRow, ...]
    """In the order drawn."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def to_text(self) -> str:
        """For a person to read."""
        tokens, targets = sum(row.tokens for row in self.rows), sum(row.targets for row in self.rows)
        head = f"step {self.step} of {self.num_steps}, epoch {self.epoch}: {len(self.rows)} rows"
        return "\n".join([f"{head}, {tokens:,} tokens, {targets:,} targets", *map(_describe, self.rows)])


def trace_step(config: SFTConfig, step: int) -> StepTrace:
    """The rows of ``step`` of the run of ``config``, drawn as the run draws them.

    A run that was resumed with other settings is followed from the newest checkpoint before the step in ``ckpt_path``.

    Raises:
        BurnishError: the config or the data is wrong, the checkpoint is of another run, or there is no such step.
    """
    card = require_valid(config)
    stores = open_train(config, card)
    num_ranks = world_size(config)
    layout = plan_layout(config, rank=0, world_size=num_ranks)
    stream = build_stream(config, card, stores, layout=layout)
    num_steps = count_steps(config, steps_per_epoch=stream.steps_per_epoch)
    if not 1 <= step <= num_steps:
        raise DataError(f"step {step}", f"is not one of the {num_steps} steps of the run", fix=f"give 1 to {num_steps}")
    draw = _draw(stream, step, config=config, stores=stores)
    store, places = stream.builder.store, RowPlaces(config, stores)
    landed = dict(_landed(stream.builder.plan(draw.rows)))
    rows = []
    for position, row in enumerate(draw.rows):
        data_rank, micro_batch, micro_batch_row = landed[position]
        rows.append(
            TracedRow(
                row=row,
                source=stores[int(store.source_of(row))].name,
                place=places.locate(row),
                tokens=int(store.lengths[row]),
                targets=int(store.target_counts[row]),
                rank=data_rank * (num_ranks // layout.data_size),
                micro_batch=micro_batch,
                micro_batch_row=micro_batch_row,
            )
        )
    return StepTrace(step, num_steps, draw.cursor["epoch"] - draw.ends_epoch, tuple(rows))


def _draw(stream: BatchStream, step: int, *, config: SFTConfig, stores: Sequence[Store]) -> Draw:
    """The draw of ``step``: sought where the order is ours and steps have a fixed size, else walked to."""
    seekable = config.sampler != "custom" and config.batch_tokens is None
    cursor = _cursor_before(step, config=config, stores=stores)
    if seekable:
        stream.seek(cursor["step"] if cursor else 0)
    if seekable and cursor in (None, stream.cursor):
        stream.seek(step - 1)
    elif cursor:
        stream.resume(cursor)  # it began with other settings
    return next(draw for draw in stream.draws() if draw.step == step)


def _cursor_before(step: int, *, config: SFTConfig, stores: Sequence[Store]) -> dict[str, Any] | None:
    """That of the newest checkpoint before ``step``."""
    complete = complete_checkpoints(config.ckpt_path) if config.ckpt_path else {}
    before = max((number for number in complete if number < step), default=None)
    if before is None:
        return None
    checkpointer = build_checkpointer(config, stores, alone())
    cursor: dict[str, Any] = checkpointer.read(complete[before], allow_changes=config.resume_allow_changes)["cursor"]
    return cursor


def _landed(plans: Sequence[RankPlan]) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """For each drawn position: data rank, micro-batch, row in it."""
    for data_rank, plan in enumerate(plans):
        for number, micro_batch in enumerate(plan):
            for row, positions in enumerate(micro_batch):
                yield from ((position, (data_rank, number, row)) for position in positions)


def _describe(row: TracedRow) -> str:
    return (
        f"row {row.row}: {row.place}, {row.tokens} tokens, {row.targets} targets; "
        f"rank {row.rank}, micro-batch {row.micro_batch}, row {row.micro_batch_row}"
    )
