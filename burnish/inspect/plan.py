"""What a run would do, known without a device: its problems, its data, its steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from burnish.assemble.data import build_stream, count_steps, open_source
from burnish.assemble.model import model_card, model_problems, plan_layout, world_size
from burnish.assemble.run import build_callbacks, build_checkpointer, find_start
from burnish.backends.comm import alone, device_count
from burnish.config import SFTConfig, find_problems
from burnish.data.store import Store, StoreReport
from burnish.data.stream import BatchStream
from burnish.errors import BurnishError, ConfigError, Problem

_STEPS_LOOKED_AT = 200
"""Packing is measured on at most this many steps of the first epoch."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The verdict of ``burnish check``. What could not be known because of ``problems`` is empty or ``None``."""

    sources: tuple[StoreReport, ...] = ()
    eval_sources: tuple[StoreReport, ...] = ()
    steps_per_epoch: int | None = None
    """None with ``batch_tokens``, where a step has no fixed number of rows."""
    num_steps: int | None = None
    tokens_per_step: float | None = None
    """Mean over the first steps of the first epoch, padding not counted."""
    packing_efficiency: float | None = None
    """Tokens by cells of the micro-batches, over the first steps of the first epoch."""
    problems: tuple[Problem, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def to_text(self) -> str:
        """For a person to read."""
        if self.problems:
            return str(ConfigError(self.problems))
        lines = [_describe(report, "train") for report in self.sources]
        lines += [_describe(report, "eval") for report in self.eval_sources]
        an_epoch = f" ({self.steps_per_epoch} an epoch)" if self.steps_per_epoch else ""
        lines.append(
            f"steps: {self.num_steps}{an_epoch}, {self.tokens_per_step:,.0f} tokens a step, "
            f"packing efficiency {self.packing_efficiency:.1%}"
        )
        return "\n".join(lines)


def check(config: SFTConfig) -> CheckReport:
    """Find every problem of ``config``, its model and its data; with none, say what the run would do."""
    problems = find_problems(config, num_devices=device_count())
    try:
        card = model_card(config)
    except ConfigError as error:
        return CheckReport(problems=(*problems, *error.problems))
    except BurnishError as error:
        return CheckReport(problems=(*problems, _problem("model.path", config.model.path, error)))
    problems += model_problems(config, card)
    if problems:
        return CheckReport(problems=tuple(problems))
    with _noted(problems, "callbacks", config.callbacks):
        build_callbacks(config)
    reports: dict[str, list[StoreReport]] = {"train": [], "eval": []}
    stores: list[Store] = []
    for role, sources in (("train", config.train_sources), ("eval", config.eval_sources)):
        for source in sources:
            with _noted(problems, f"{role} data", source.path):
                store = open_source(config, card, source)
                reports[role].append(store.report)
                stores += [store] if role == "train" else []
    if problems:
        return CheckReport(problems=tuple(problems))
    with _noted(problems, "resume_from", config.resume_from):
        find_start(config, build_checkpointer(config, stores, alone()))
    with _noted(problems, "sampler_class_path", config.sampler_class_path):
        stream = build_stream(config, card, stores, layout=plan_layout(config, rank=0, world_size=world_size(config)))
    if problems:
        return CheckReport(problems=tuple(problems))
    tokens_per_step, packing_efficiency = _look_at(stream)
    return CheckReport(
        sources=tuple(reports["train"]),
        eval_sources=tuple(reports["eval"]),
        steps_per_epoch=stream.steps_per_epoch,
        num_steps=count_steps(config, steps_per_epoch=stream.steps_per_epoch),
        tokens_per_step=tokens_per_step,
        packing_efficiency=packing_efficiency,
    )


@contextmanager
def _noted(problems: list[Problem], key: str, value: Any) -> Iterator[None]:
    """What goes wrong becomes one more of ``problems``."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
    except BurnishError as error:
        problems.append(_problem(key, value, error))


def _problem(key: str, value: Any, error: BurnishError) -> Problem:
    return Problem(key, value, f"{error.where}: {error.problem}", error.fix)


def _look_at(stream: BatchStream) -> tuple[float, float]:
    """Tokens a step, and tokens by cells."""
    tokens, cells, steps = 0, 0, 0
    for draw in islice(stream.draws(), _STEPS_LOOKED_AT):
        lengths = stream.builder.store.lengths[list(draw.rows)].tolist()
        tokens += sum(lengths)
        cells += _cells(lengths, stream.builder.plan(draw.rows))
        steps += 1
        if draw.ends_epoch:
            break
    return tokens / steps, tokens / cells


def _cells(lengths: Sequence[int], plans: Sequence[Any]) -> int:
    total = 0
    for micro_batch in (m for plan in plans for m in plan):
        longest = max(1, *(sum(lengths[p] for p in row) for row in micro_batch), 1)
        total += longest * len(micro_batch)
    return total


def _describe(report: StoreReport, role: str) -> str:
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(report.dropped.items()))
    return (
        f"{role} {report.name}: {report.kept:,} of {report.rows:,} rows, {report.tokens:,} tokens, "
        f"{report.targets:,} targets" + (f"; dropped: {dropped}" if dropped else "")
    )
