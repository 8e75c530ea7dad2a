"""A config becomes a few measured steps, each side in a process of its own, one after the other."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from burnish.assemble.model import cache_settings, require_valid
from burnish.backends.comm import device_type
from burnish.bench.rows import draw_lengths, write_rows
from burnish.bench.watch import Measured, Watch
from burnish.config import SFTConfig
from burnish.config.loop import CheckpointKeys, EvalKeys, LogKeys
from burnish.errors import BurnishError, ConfigError, Problem
from burnish.models.blank import SMALL, write_blank
from burnish.models.load import bring_model, read_card

BUILT_IN = "built-in"
"""The ``model.path`` that stands for a small shape."""
_DISTRIBUTIONS = ("lognormal", "fixed")
_LINES_SHOWN = 30
_PATIENT = {"GOMP_SPINCOUNT": "10000"}
"""Threads that wait for each other spin only briefly: on a busy machine, long spinning makes a step many times slower."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is measured, beside what the config says."""

    lengths: str = ""
    """``lognormal`` or ``fixed``; empty is the config's own data, and ``lognormal`` where it names none."""
    mean: int = 300
    """Tokens of a row."""
    cv: float = 1.3
    """Standard deviation of a lognormal length, by the mean."""
    targets: float = 1.0
    """Share of the tokens that are trained on."""
    shape: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    """Config of the built-in model."""
    vocabulary: int = 0
    """Rows of its embedding; 0 is the shape's."""
    warmup: int = 2
    """Steps before the measured ones."""
    steps: int = 10
    """Measured steps."""
    compare: str = ""
    """``trl``, or nobody."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Each side by its name, ours first."""

    sides: Mapping[str, Measured]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        sides = {
            name: {**asdict(side), "tokens_per_second": side.tokens_per_second} for name, side in self.sides.items()
        }
        return {**sides, "ratios": self._ratios()}

    def to_text(self) -> str:
        """A table in Markdown."""
        lines = [
            "| | tokens/s | tokens/CPU s | s a step | MFU | memory, GiB | above the start, GiB | data wait | last loss |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for name, side in self.sides.items():
            cells = (
                f"{side.tokens_per_second:,.0f}",
                f"{side.tokens / side.cpu_seconds:,.0f}",
                f"{side.seconds / side.steps:.3f}",
                _percent(side.mfu),
                f"{side.memory_peak_gib:.2f}",
                f"{side.memory_above_start_gib:.2f}",
                _percent(side.data_wait),
                f"{side.loss:.4f}",
            )
            lines.append(f"| {name} | {' | '.join(cells)} |")
        if ratios := self._ratios():
            lines.append("ours by theirs: " + ", ".join(f"{ratio:.2f} in {name}" for name, ratio in ratios.items()))
        return "\n".join(lines)

    def _ratios(self) -> dict[str, float]:
        """Ours by theirs; none without a comparison."""
        if len(self.sides) < 2:
            return {}
        ours, theirs = self.sides.values()
        return {
            "tokens/s": ours.tokens_per_second / theirs.tokens_per_second,
            "tokens/CPU s": ours.tokens / ours.cpu_seconds / (theirs.tokens / theirs.cpu_seconds),
            "memory above the start": ours.memory_above_start_gib / theirs.memory_above_start_gib,
        }


def bench(config: SFTConfig, settings: BenchSettings) -> BenchReport:
    """Measure ``config``, with random weights, and who it is to be compared with.

    Raises:
        ConfigError: a setting or a key cannot be had.
        BurnishError: a side failed.
    """
    _require_known(config, settings)
    with TemporaryDirectory(prefix="burnish-bench-") as name:
        folder = Path(name)
        run = _prepared(config, settings, folder)
        require_valid(run)
        file = folder / "run.yaml"
        file.write_text(run.to_yaml())
        sides = {"Burnish": _measured("Burnish", ["burnish", "train", str(file)], folder)}
        if settings.compare:
            words = ["burnish.bench.trl", str(file), str(folder / "measured.json"), str(settings.warmup)]
            sides["TRL"] = _measured("TRL", words, folder)
    return BenchReport(sides)


def _require_known(config: SFTConfig, settings: BenchSettings) -> None:
    problems = []
    if settings.lengths not in ("", *_DISTRIBUTIONS):
        problems.append(Problem("lengths", settings.lengths, "is no distribution", "write lognormal or fixed"))
    if settings.lengths and config.train_sources:
        fix = "leave out lengths, or the data"
        problems.append(Problem("lengths", settings.lengths, "the config names data with lengths of its own", fix))
    if settings.warmup < 1 or settings.steps < 1:
        problems.append(
            Problem("steps", settings.steps, "at least one step of each is needed", "write steps=10 warmup=2")
        )
    if settings.compare not in ("", "trl"):
        problems.append(Problem("compare", settings.compare, "is nobody known", "write compare=trl, or leave it out"))
    if settings.compare and importlib.util.find_spec("trl") is None:
        problems.append(Problem("compare", settings.compare, "is not installed beside Burnish", "pip install trl"))
    if problems:
        raise ConfigError(problems)


def _prepared(config: SFTConfig, settings: BenchSettings, folder: Path) -> SFTConfig:
    """The run that is measured: only steps, of a model with random weights, all its files in ``folder``."""
    kept = config.model_dump(mode="json", exclude_unset=True)
    for keys in (CheckpointKeys, EvalKeys, LogKeys):
        kept = {key: value for key, value in kept.items() if key not in keys.model_fields}
    kept = {
        key: value for key, value in kept.items() if not key.startswith(("eval_", "dummy_run_")) and key != "num_epochs"
    }
    values = {
        **({} if config.batch_tokens else {"batch_size": 64}),
        "max_length": 2048,
        "use_sequence_packing": config.remove_microbatch_padding,
        **kept,
        "num_steps": settings.warmup + settings.steps,
        "log_dir": str(folder / "runs"),
        "logger": [],
        "callbacks": [
            *config.callbacks,
            {f"{Watch.__module__}.Watch": {"out": str(folder / "measured.json"), "warmup": settings.warmup}},
        ],
    }
    values["model"] = {**kept["model"], "path": str(folder / "model")}
    _write_model(config, settings, folder / "model")
    if not config.train_sources:
        values["pretokenized_dataset_paths"] = [str(folder / "rows.arrow")]
        values["cache_dir"] = str(folder / "cache")
        count = values.get("batch_size") or -(-2 * values["batch_tokens"] // settings.mean)
        lengths = draw_lengths(
            settings.lengths or "lognormal",
            count=count * values["num_steps"],
            mean=settings.mean,
            cv=settings.cv,
            longest=values["max_length"],
        )
        vocabulary = read_card(str(folder / "model")).num_embeddings
        write_rows(folder / "rows.arrow", lengths, vocabulary=vocabulary, target_share=settings.targets)
    return SFTConfig(**values)


def _write_model(config: SFTConfig, settings: BenchSettings, folder: Path) -> None:
    if config.model.path == BUILT_IN:
        rows = settings.vocabulary or settings.shape["vocab_size"]
        shape: str | Mapping[str, Any] = {**settings.shape, "vocab_size": rows}
    else:
        shape = bring_model(config.model.path, weights=False, **cache_settings(config))
    device = device_type()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    write_blank(folder, shape=shape, dtype=dtype, device=device, trust_remote_code=config.model.trust_remote_code)
    torch.cuda.empty_cache()  # the sides need the memory


def _measured(name: str, words: list[str], folder: Path) -> Measured:
    log = folder / "log"
    with log.open("wb") as stream:
        command = [sys.executable, "-m", *words]
        status = subprocess.run(
            command, stdout=stream, stderr=subprocess.STDOUT, env=_PATIENT | os.environ, check=False
        ).returncode
    if status:
        said = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:])
        raise BurnishError(f"bench, {name}", f"ended with status {status} and said:\n{said}", fix="mend what it names")
    return Measured.read(folder / "measured.json")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
