"""What a run would do, known without a device: its problems, its data, its steps, its memory and its time."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from burnish.assemble.data import build_stream, count_steps, open_source
from burnish.assemble.dummy import dummy_of, dummy_rows
from burnish.assemble.model import flops_counter, model_card, model_problems, plan_layout
from burnish.assemble.run import build_callbacks, build_checkpointer, build_questions, find_start
from burnish.backends.comm import alone, device_count, device_type
from burnish.config import SFTConfig, find_problems
from burnish.config.rules_devices import planned_world
from burnish.data.packing import Layout, round_up
from burnish.data.random_rows import RandomStore
from burnish.data.store import Store, StoreReport
from burnish.data.stream import BatchStream
from burnish.errors import BurnishError, ConfigError, Problem
from burnish.inspect.cautions import find_cautions
from burnish.inspect.memory import USABLE, Load, MemoryEstimate, checkpoint_bytes, estimate_memory, readable_size
from burnish.models.flops import Device, peak_flops
from burnish.models.load import ModelCard

MFU = 0.4
"""Share of a device's operations that a run is taken to use, where none is said."""
_STEPS_LOOKED_AT, _ROWS_LOOKED_AT = 200, 100_000
"""Packing is measured on at most so much of the first epoch."""
_DATA_KEYS = ("train_dataset", "eval_dataset", "eval_pretokenized", "pretokenized", "max_length")
"""Keys without which data cannot be opened as it would be."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the run does with the data; what is a mean is one over the first steps of the first epoch."""

    steps_per_epoch: int | None
    """None with ``batch_tokens``, where a step has no fixed number of rows."""
    num_steps: int
    num_epochs: float
    num_rows: int
    """Rows drawn in all."""
    total_tokens: int
    """Of these."""
    passes: tuple[float, ...]
    """How often each row of each source is drawn, on average."""
    tokens_per_step: float
    """Padding not counted."""
    packing_efficiency: float
    """Tokens by cells of the micro-batches."""
    load: Load
    """The most that a rank was given."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The verdict of ``burnish check``. What could not be known because of ``problems`` is empty or ``None``."""

    sources: tuple[StoreReport, ...] = ()
    eval_sources: tuple[StoreReport, ...] = ()
    plan: Plan | None = None
    num_ranks: int | None = None
    device: Device | None = None
    """The one named, else that of this machine; None is a CPU."""
    memory: MemoryEstimate | None = None
    """Of one rank."""
    fits: bool | None = None
    """Whether that is less than a run is given of the device's memory."""
    mfu: float = MFU
    seconds: float | None = None
    """Of the training at ``mfu``, evaluation and saving not counted."""
    warnings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, numbers of ``plan`` beside the others."""
        shown = asdict(self)
        plan = shown.pop("plan") or dict.fromkeys(Plan.__dataclass_fields__)
        memory = {**shown["memory"], "total": self.memory.total} if self.memory else None
        return {**shown, **plan, "memory": memory}

    def to_text(self) -> str:
        """For a person to read."""
        if self.problems or not self.plan or not self.memory:
            return str(ConfigError(self.problems))
        drawn = zip(self.sources, self.plan.passes, strict=True)
        blocks = {
            "data": [line for source, times in drawn for line in _describe(source, "train", times)]
            + [line for source in self.eval_sources for line in _describe(source, "eval", None)],
            "run": _table(_of_plan(self.plan) | self._time()),
            f"memory of a rank, one of {self.num_ranks}": _table(_of_memory(self.memory) | self._verdict()),
            "warnings": [f"  {text}" for text in self.warnings],
        }
        return "\n".join(line for title, lines in blocks.items() if lines for line in (title, *lines))

    def _time(self) -> dict[str, str]:
        if self.seconds is None or self.device is None or self.device.peak_flops is None:
            return {"time": "not known; name the GPU, as in device=h100-80g"}
        units = {"h": 3600, "min": 60, "s": 1}
        fitting = (f"{self.seconds / length:,.1f} {unit}" for unit, length in units.items() if self.seconds >= length)
        each = f"{self.device.peak_flops / 1e12:,.0f} TFLOP/s"
        return {
            "time": f"{next(fitting, 'less than 1 s')} at mfu={self.mfu:g} of {self.num_ranks} x {each}, without evaluation and saving"
        }

    def _verdict(self) -> dict[str, str]:
        if self.device is None:
            return {"device": "none; name the GPU, as in device=h100-80g"}
        verdict = "fits" if self.fits else "DOES NOT FIT"
        used, whole = (readable_size(self.device.memory_gib * 2**30 * share) for share in (USABLE, 1))
        return {self.device.name: f"{verdict}: {used}, {USABLE:.0%} of its {whole}, can be used"}


def check(config: SFTConfig, *, device: Device | None = None, mfu: float = MFU) -> CheckReport:
    """Find every problem of ``config``, its model and its data; with none, say what the run would do.

    Args:
        config: of the run.
        device: what it is to run on; None is what this machine has.
        mfu: share of the device's operations that it uses.
    """
    # A machine that is only named has as many GPUs as are asked for.
    num_devices = config.placement.num_gpus_per_node if device else device_count()
    device = device or _present()
    problems = find_problems(config, num_devices=num_devices)
    with _noted(problems, "callbacks", config.callbacks):
        build_callbacks(config)
    card = None
    with _noted(problems, "model.path", config.model.path):
        card = model_card(config)
    if card is None:
        return CheckReport(problems=(*problems, *_missing(config)))
    problems += model_problems(config, card, on_cpu=device is None)
    with _noted(problems, "eval_generate.prompts", config.eval_generate.prompts):
        build_questions(config, card)
    config = dummy_of(config)
    stores: dict[str, list[Store]] = {"train": [], "eval": []}
    readable = not any(problem.key.startswith(_DATA_KEYS) for problem in problems)
    for role, sources in (("train", config.train_sources), ("eval", config.eval_sources)):
        for source in sources if readable else ():
            with _noted(problems, f"{role} data", source.path):
                stores[role].append(open_source(config, card, source))
    if problems:
        return CheckReport(problems=tuple(problems))
    drawn = [dummy_rows(config, card)] if config.dummy_run_full_ctx else stores["train"]
    world = planned_world(config, os.environ, num_devices=num_devices)
    key = "resume_from" if config.resume_from else "ckpt_path"
    with _noted(problems, key, getattr(config, key)):
        find_start(config, build_checkpointer(config, drawn, alone()))
    layout = plan_layout(config, rank=0, world_size=world)
    with _noted(problems, "sampler_class_path", config.sampler_class_path):
        stream = build_stream(config, card, drawn, layout=layout)
    if problems:
        return CheckReport(problems=tuple(problems))
    evals = {source.name: store for source, store in zip(config.eval_sources, stores["eval"], strict=True)}
    plan = _plan(config, stream, layout)
    with _noted(problems, "model.path", config.model.path):
        return _report(config, card, drawn, evals, plan, device=device, world=world, mfu=mfu)
    return CheckReport(problems=tuple(problems))


def _report(
    config: SFTConfig,
    card: ModelCard,
    stores: Sequence[Store | RandomStore],
    evals: dict[str, Store],
    plan: Plan,
    *,
    device: Device | None,
    world: int,
    mfu: float,
) -> CheckReport:
    memory = estimate_memory(config, card, world=world, load=plan.load, on_gpu=device is not None)
    peak = device.peak_flops if device else None
    real = [store for store in stores if isinstance(store, Store)]
    # Of random rows there is nothing to say.
    cautions = (
        []
        if not real
        else find_cautions(
            config,
            card,
            stores=real,
            evals=evals,
            passes=plan.passes,
            num_steps=plan.num_steps,
            checkpoint_bytes=checkpoint_bytes(config, card),
        )
    )
    return CheckReport(
        sources=tuple(store.report for store in stores),
        eval_sources=tuple(store.report for store in evals.values()),
        plan=plan,
        num_ranks=world,
        device=device,
        memory=memory,
        fits=memory.total <= USABLE * device.memory_gib * 2**30 if device else None,
        mfu=mfu,
        seconds=_flops(config, card, stores, plan) / (mfu * peak * world) if peak else None,
        warnings=tuple(cautions),
    )


@contextmanager
def _noted(problems: list[Problem], key: str, value: Any) -> Iterator[None]:
    """What goes wrong becomes one more of ``problems``."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
    except BurnishError as error:
        message = error.problem if error.where == value else f"{error.where}: {error.problem}"
        # What is wrong with a template, say, is wrong for each dataset.
        if error.where == value or message not in [problem.message for problem in problems]:
            problems.append(Problem(key, value, message, error.fix))


def _missing(config: SFTConfig) -> Iterator[Problem]:
    """Local data that is not there; without a model no more can be known of it."""
    for role, sources in (("train", config.train_sources), ("eval", config.eval_sources)):
        for source in sources:
            if source.path.startswith(("/", ".", "~")) and not Path(source.path).expanduser().exists():
                yield Problem(f"{role} data", source.path, "no such path", "name a file or folder that exists")


def _present() -> Device | None:
    if device_type() != "cuda":
        return None
    found = torch.cuda.get_device_properties(0)
    return Device(found.name, found.total_memory / 2**30, peak_flops(found.name))


@dataclass(slots=True)
class _Looked:
    """Sums and maxima over the first steps."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    cells: int = 0
    most: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    """As in ``Load``."""
    drawn: Any = 0
    """[sources] rows of each."""


def _look_at(stream: BatchStream, layout: Layout) -> _Looked:
    store, looked = stream.builder.store, _Looked()
    for draw in islice(stream.draws(), _STEPS_LOOKED_AT):
        rows = np.array(draw.rows)
        looked.steps += 1
        looked.rows += len(rows)
        looked.tokens += int(store.lengths[rows].sum())
        looked.drawn = looked.drawn + np.bincount(store.source_of(rows), minlength=len(store.stores))
        sizes = round_up(store.lengths[rows], layout.segment_multiple).tolist()
        others = [store.target_counts[rows].tolist(), store.num_patches[rows].tolist()]
        for plan in stream.builder.plan(draw.rows):
            for micro_batch in plan:
                longest = round_up(max(1, *(sum(sizes[p] for p in row) for row in micro_batch), 1), layout.row_multiple)
                cells = longest * len(micro_batch)
                looked.cells += cells
                counts = [sum(each[p] for row in micro_batch for p in row) for each in others]
                looked.most = [*map(max, looked.most, [cells, *counts, len(plan)])]
        if draw.ends_epoch or looked.rows > _ROWS_LOOKED_AT:
            break
    return looked


def _plan(config: SFTConfig, stream: BatchStream, layout: Layout) -> Plan:
    looked = _look_at(stream, layout)
    num_steps = count_steps(config, steps_per_epoch=stream.steps_per_epoch)
    num_rows = round(num_steps * looked.rows / looked.steps)
    if stream.steps_per_epoch is not None:
        epochs, rest = divmod(num_steps, stream.steps_per_epoch)
        num_rows = epochs * stream.draws_per_epoch + rest * config.batch_size
    stores = stream.builder.store.stores
    sizes = np.array([len(store) for store in stores])
    weights = looked.drawn if config.sampler == "custom" else sizes
    weights = np.array(config.train_dataset_weights or weights, np.float64)
    passes = weights / weights.sum() * num_rows / sizes
    if config.sampler == "sequential":
        whole, rest = divmod(num_rows, int(sizes.sum()))
        passes = whole + np.clip(rest - (np.cumsum(sizes) - sizes), 0, sizes) / sizes
    tokens = sum(float(times) * int(store.lengths.sum()) for times, store in zip(passes, stores, strict=True))
    return Plan(
        steps_per_epoch=stream.steps_per_epoch,
        num_steps=num_steps,
        num_epochs=num_rows / stream.draws_per_epoch,
        num_rows=num_rows,
        total_tokens=round(tokens),
        passes=tuple(passes.tolist()),
        tokens_per_step=looked.tokens / looked.steps,
        packing_efficiency=looked.tokens / looked.cells,
        load=Load(*looked.most),
    )


def _flops(config: SFTConfig, card: ModelCard, stores: Sequence[Store | RandomStore], plan: Plan) -> float:
    """Of the whole run, as ``train/mfu`` counts them."""
    count = flops_counter(config, card)
    images = [store.num_patches[store.num_patches > 0] for store in stores]
    passes = [
        count(lengths=store.lengths, num_targets=int(store.target_counts.sum()), patches=patches)
        for store, patches in zip(stores, images, strict=True)
    ]
    return float(np.dot(plan.passes, passes))


def _describe(report: StoreReport, role: str, passes: float | None) -> Iterator[str]:
    yield f"  {role:5} {report.name}"
    facts = f"{report.kept:,} of {report.rows:,} rows, {report.tokens:,} tokens, {report.targets:,} targets"
    yield f"        {facts}" + ("" if passes is None else f", passed {passes:.2f} times")
    if report.dropped:
        yield "        dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in sorted(report.dropped.items()))


def _of_plan(plan: Plan) -> dict[str, str]:
    an_epoch = f", {plan.steps_per_epoch:,} an epoch" if plan.steps_per_epoch else ""
    load = plan.load
    return {
        "steps": f"{plan.num_steps:,}{an_epoch}; {plan.num_epochs:.2f} epochs, {plan.num_rows:,} rows drawn",
        "tokens": f"{plan.total_tokens:,}; {plan.tokens_per_step:,.0f} a step",
        "packing": f"{plan.packing_efficiency:.1%} of the places in micro-batches hold a token",
        "largest": f"{load.tokens:,} tokens a micro-batch, {load.micro_batches:,} micro-batches a step and rank",
    }


def _of_memory(memory: MemoryEstimate) -> dict[str, str]:
    parts = {name: size for name, size in asdict(memory).items() if name != "host"} | {"total": memory.total}
    parts |= {"in host memory": memory.host} if memory.host else {}
    return {name: f"{readable_size(size):>13}" for name, size in parts.items()}


def _table(facts: dict[str, str]) -> list[str]:
    width = max(map(len, facts))
    return [f"  {name:{width}}  {text}" for name, text in facts.items()]
