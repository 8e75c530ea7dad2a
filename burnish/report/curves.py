"""Curves become charts: which metrics share one, how noise is smoothed, and how many points a page can hold."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burnish.report.read import Curve, Run

MOST_POINTS = 2000
"""Points of a curve on a page."""
_DIGITS = 7
_MOST_SMOOTHED = 500


@dataclass(frozen=True, slots=True)
class Kind:
    """A chart that runs may have."""

    section: str
    title: str
    unit: str
    metric: str
    """Pattern of the metrics in it; what its group holds names the curve."""
    tick: str = ""
    """How numbers are written at the axis, as d3 formats them, or ``e`` for powers of ten; empty: as their size asks for."""
    scale: float = 1.0
    suffix: str = ""
    """Written after each number."""
    smooth: bool = False
    """Whether a running mean is drawn over the values."""
    sparse: bool = False
    """Whether only some steps have it, each worth a mark."""


_LOSS, _OPTIMIZER, _SPEED, _OTHER = "Loss", "Optimizer", "Speed and memory", "Other metrics"
_KINDS = (
    Kind(_LOSS, "Training loss", "cross-entropy per target", "train/loss()", smooth=True),
    Kind(_LOSS, "Evaluation loss", "cross-entropy per target", "eval/(.+)/loss", sparse=True),
    Kind(_LOSS, "Evaluation perplexity", "exp(loss)", "eval/(.+)/perplexity", sparse=True),
    Kind(_LOSS, "Training loss by source", "cross-entropy per target", "train/loss/(.+)", smooth=True),
    Kind(_OPTIMIZER, "Learning rate", "per step", "train/lr()", tick="e"),
    Kind(_OPTIMIZER, "Gradient norm", "before clipping", "train/grad_norm()", smooth=True),
    Kind(_SPEED, "Throughput", "tokens per second", "train/tokens_per_second()", tick="~s", smooth=True),
    Kind(_SPEED, "Model FLOPs utilisation", "MFU, %", "train/mfu()", scale=100, suffix=" %", smooth=True),
    Kind(_SPEED, "Time of a step", "seconds", "timing/(step|forward_backward|optimizer)"),
    Kind(_SPEED, "Waiting for data", "seconds of a step", "timing/data_wait()", smooth=True),
    Kind(_SPEED, "Evaluations and checkpoints", "seconds each", "timing/(eval|checkpoint)", sparse=True),
    Kind(_SPEED, "Peak memory", "GiB on a device", "train/memory_peak_gib()"),
    Kind(_SPEED, "Packing efficiency", "tokens by cells, %", "train/packing_efficiency()", "", 100, " %", smooth=True),
    Kind(_SPEED, "Tokens of a step", "tokens", "train/num_(tokens|targets)", tick="~s"),
)
_NOT_DRAWN = "train/(epoch|total_tokens|skipped|tokens_per_second_per_gpu)|eval/.+/num_targets"
"""Counters, and what another curve shows already."""


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every chart that has a curve, JSON-ready, with the curves of all ``runs`` in it."""
    found = [_chart(kind, runs) for kind in (*_KINDS, *_others(runs))]
    return [chart for chart in found if chart["traces"]]


def _others(runs: Sequence[Run]) -> Iterator[Kind]:
    """A chart for each metric that no kind knows, such as those of callbacks."""
    drawn = "|".join([_NOT_DRAWN, *(kind.metric for kind in _KINDS)])
    for key in sorted({key for run in runs for key in run.curves if not re.fullmatch(drawn, key, re.DOTALL)}):
        yield Kind(_OTHER, key, "", f"{re.escape(key)}()")


def _chart(kind: Kind, runs: Sequence[Run]) -> dict[str, Any]:
    pattern = re.compile(kind.metric, re.DOTALL)
    keys = sorted({key for run in runs for key in run.curves if pattern.fullmatch(key)})
    traces = []
    for number, run in enumerate(runs):
        for series, key in enumerate(keys):
            curve = run.curves.get(key)
            if curve is None or np.isnan(curve.values).all():
                continue
            named = [run.name if len(runs) > 1 else "", _label(pattern, key)]
            label = " · ".join(filter(None, named)) or kind.title
            colour, dash = (number, series) if len(runs) > 1 else (series, 0)
            look = {"label": label, "colour": colour, "dash": dash}
            traces += [{**look, **trace} for trace in _traces(kind, curve, label)]
    shown = {"section": kind.section, "title": kind.title, "unit": kind.unit, "tick": kind.tick, "suffix": kind.suffix}
    return {**shown, "traces": traces}


def _label(pattern: re.Pattern[str], key: str) -> str:
    """What the pattern's group holds; of timings, in words."""
    found = pattern.fullmatch(key)
    assert found
    return found[1].replace("_", " ") if key.startswith("timing/") else found[1]


def _traces(kind: Kind, curve: Curve, label: str) -> Iterator[dict[str, Any]]:
    """What is drawn of a curve: its values, and over them their mean where they are noisy."""
    window = smoothing_window(len(curve.values)) if kind.smooth else 1
    style = "marked" if kind.sparse else "raw" if window > 1 else "line"
    yield {"style": style, "name": escape(label, quote=False), **_points(curve, kind.scale)}
    if window > 1:
        mean = Curve(curve.steps, running_mean(curve.values, window))
        yield {"style": "line", "name": f"{escape(label, quote=False)}, mean of {window}", **_points(mean, kind.scale)}


def _points(curve: Curve, scale: float) -> dict[str, list[Any]]:
    curve = thinned(curve)
    values = (curve.values * scale).tolist()
    return {
        "x": curve.steps.tolist(),
        "y": [None if math.isnan(value) else float(f"{value:.{_DIGITS}g}") for value in values],
    }


def smoothing_window(num_points: int) -> int:
    """How many values a mean is taken of: a twentieth of the curve."""
    return min(max(1, num_points // 20), _MOST_SMOOTHED)


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The mean of each value and the ``window - 1`` before it; those that are not known are left out."""
    known, ones = ~np.isnan(values), np.ones(window)
    # No differences of running sums: one spike of 1e15 would leave its rounding in all means after it.
    sums = np.convolve(np.where(known, values, 0.0), ones)[: len(values)]
    counts = np.convolve(known, ones)[: len(values)]
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def thinned(curve: Curve, *, most: int = MOST_POINTS) -> Curve:
    """``curve`` in at most ``most`` points: of each stretch of steps the lowest and the highest, so that spikes stay."""
    if len(curve.steps) <= most:
        return curve
    edges = np.linspace(1, len(curve.steps) - 1, most // 2).astype(int)
    kept = [0, len(curve.steps) - 1]
    for start, end in pairwise(edges.tolist()):
        stretch = curve.values[start:end]
        kept += [start] if np.isnan(stretch).all() else [start + np.nanargmin(stretch), start + np.nanargmax(stretch)]
    at = np.unique(kept)
    return Curve(curve.steps[at], curve.values[at])
