"""Runs become one page of HTML: curves, data, rows, generations and config, with all it needs inside.

The rule: what a run holds is text. Templates escape it, JSON in a script cannot end it, and the page runs no script but ours.
"""

import base64
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader

from burnish.assemble.facts import Facts
from burnish.errors import StorageError
from burnish.report.curves import charts, running_mean, smoothing_window
from burnish.report.read import Answer, Curve, Run, read_runs

PAGE_FILE = "report.html"
_MOST_ANSWERS, _MOST_PROMPTS = 12, 20


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in a few numbers; ``None`` is not known."""

    step: int
    epoch: float | None
    tokens: float
    targets: float
    loss: float | None
    """Of the last step that has one."""
    loss_mean: float | None
    """Over the last steps."""
    mean_of: int
    best: dict[str, tuple[float, int]]
    """Lowest loss of each eval set, and its step."""
    seconds: float
    """In steps, evaluations and checkpoints."""
    waiting: float
    """Share of these spent waiting for data."""
    tokens_per_second: float | None
    mfu: float | None
    memory_gib: float | None
    skipped: int
    """Steps that changed nothing: their loss or gradient was not finite."""


def write_report(folders: Sequence[Path], *, out: Path | None = None) -> Path:
    """Write the page of the runs in ``folders`` to ``out``, by default into the first folder; returns where it is.

    Raises:
        DataError: a folder is no run's.
        StorageError: the page cannot be written.
    """
    runs = read_runs(folders)
    file = out or folders[0] / PAGE_FILE
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(render(runs), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        fix = "give out=FILE, in a folder that can be written"
        raise StorageError(str(file), f"cannot be written: {error.strerror}", fix=fix) from error
    finally:
        if partial.exists():
            partial.unlink()
    return file


def render(runs: Sequence[Run]) -> str:
    """The page, self-contained."""
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0], ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": _number, "duration": _duration}
    scripts = [get_plotlyjs(), files(__package__).joinpath("page.js").read_text(encoding="utf-8")]
    drawn = charts(runs)
    return environment.get_template("page.html").render(
        title=" vs ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        runs=runs,
        summaries=[summary(run) for run in runs],
        sections=[(name, list(group)) for name, group in groupby(drawn, key=lambda chart: chart["section"])],
        charts=drawn,
        data=_by_facts(runs),
        generations=[(run, _by_prompt(run.answers)) for run in runs if run.answers],
        keys=_keys(runs),
        style=files(__package__).joinpath("page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
    )


def summary(run: Run) -> Summary:
    """The numbers at the top of the page."""
    steps, loss = run.curves.get("timing/step"), _known(run, "train/loss")
    seconds, tokens = _total(run, "timing/step"), _total(run, "train/num_tokens")
    window = smoothing_window(len(loss))
    return Summary(
        step=max(int(curve.steps[-1]) for curve in run.curves.values()),
        epoch=_last(_known(run, "train/epoch")),
        # Counted by the run itself, also over steps whose lines another folder has.
        tokens=_last(_known(run, "train/total_tokens")) or tokens,
        targets=_total(run, "train/num_targets"),
        loss=_last(loss),
        loss_mean=_last(running_mean(loss, window)),
        mean_of=window,
        best=dict(_best(run)),
        seconds=seconds + _total(run, "timing/eval") + _total(run, "timing/checkpoint"),
        waiting=_total(run, "timing/data_wait") / seconds if seconds else 0.0,
        tokens_per_second=tokens / seconds if steps is not None and seconds else None,
        mfu=float(np.mean(mfu)) if len(mfu := _known(run, "train/mfu")) else None,
        memory_gib=float(np.max(peaks)) if len(peaks := _known(run, "train/memory_peak_gib")) else None,
        skipped=int(_total(run, "train/skipped")),
    )


def _best(run: Run) -> Iterator[tuple[str, tuple[float, int]]]:
    for key, curve in run.curves.items():
        if key.startswith("eval/") and key.endswith("/loss") and not np.isnan(curve.values).all():
            at = int(np.nanargmin(curve.values))
            yield key.removeprefix("eval/").removesuffix("/loss"), (float(curve.values[at]), int(curve.steps[at]))


def _known(run: Run, key: str) -> Any:
    curve: Curve | None = run.curves.get(key)
    return np.empty(0) if curve is None else curve.values[~np.isnan(curve.values)]


def _total(run: Run, key: str) -> float:
    return float(_known(run, key).sum())


def _last(values: Any) -> float | None:
    return float(values[-1]) if len(values) else None


def _by_facts(runs: Sequence[Run]) -> list[tuple[list[str], Facts]]:
    """The data of the runs, once where several have the same; without those that have none."""
    found: list[tuple[list[str], Facts]] = []
    for run in runs:
        names = next((names for names, facts in found if facts == run.facts), None)
        if names is not None:
            names.append(run.name)
        elif run.facts.sources:
            found.append(([run.name], run.facts))
    return found


def _by_prompt(answers: Sequence[Answer]) -> list[tuple[str, int, list[Answer]]]:
    """Each prompt, how often it was answered, and answers spread over the run."""
    of_prompt: dict[str, list[Answer]] = {}
    for answer in answers:
        of_prompt.setdefault(answer.prompt, []).append(answer)
    return [(prompt, len(of), _spread(of)) for prompt, of in list(of_prompt.items())[:_MOST_PROMPTS]]


def _spread(answers: list[Answer]) -> list[Answer]:
    shown = np.unique(np.linspace(0, len(answers) - 1, _MOST_ANSWERS).round().astype(int))
    return [answers[at] for at in shown]


def _keys(runs: Sequence[Run]) -> dict[str, list[tuple[str, list[str], bool]]]:
    """The config keys that a run was given, and all others: name, value in each run, and whether these differ."""
    given = list(dict.fromkeys(key for run in runs for key in run.given))
    rest = list(dict.fromkeys(key for run in runs for key in run.defaults if key not in given))
    rows = {}
    for name, keys in (("given", given), ("rest", rest)):
        values = [(key, [run.given.get(key, run.defaults.get(key, "")) for run in runs]) for key in keys]
        rows[name] = [(key, found, len(set(found)) > 1) for key, found in values]
    return rows


def _number(value: float | None, digits: int = 4) -> str:
    """As short as ``digits`` digits allow: 12,345; 1.23 M; 0.0123; 1.2e-05."""
    if value is None:
        return "-"
    rounded = float(f"{value:.{digits - 1}g}")
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if abs(value) >= 1e6 and abs(rounded) >= size:
            return f"{rounded / size:.{digits - 1}g}{unit}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.{digits}g}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min {rest:02} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
