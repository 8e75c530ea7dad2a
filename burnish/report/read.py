"""The files of a run's folder become numbers and texts to show; of whatever a run left unfinished, what is whole.

The rule: nothing is known of a run but its folder.
"""

import json
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from burnish.assemble.facts import CONFIG_FILE, DATA_FILE, Facts
from burnish.errors import DataError, without_secret_values
from burnish.log import get_logger
from burnish.train.trackers import ANSWERS_FILE, METRICS_FILE

log = get_logger(__name__)

_STEP_LIMIT = 2**53

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over the steps it was logged at."""

    steps: NDArray[np.int64]
    """[points] ascending"""
    values: NDArray[np.float64]
    """[points] nan where it was not known"""


class Answer(BaseModel):
    """What the model answered to a prompt after a step."""

    step: int
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Run:
    """All that the folder of a run holds."""

    name: str
    curves: Mapping[str, Curve]
    """By the name of the metric."""
    torn_lines: int
    """Of ``metrics.jsonl``, left out; the last one of a run that still writes it is not counted."""
    given: Mapping[str, str]
    """The config keys that were given, and their values as text."""
    defaults: Mapping[str, str]
    """All others."""
    facts: Facts
    answers: tuple[Answer, ...]
    """In the order of steps; of a prompt answered twice after a step, the last."""


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in ``folders``, each once, under names that tell them apart.

    Raises:
        DataError: a folder is not there, or is no run's, or its run has not made a step; or there are none.
    """
    if not folders:
        raise DataError("RUN_DIR", "names no run", fix="write burnish report RUN_DIR, such as runs/sft")
    places: dict[Path, Path] = {}
    for folder in folders:
        places.setdefault(folder.resolve(), folder)
    return [_read_run(folder, _name(place, places)) for place, folder in places.items()]


def _name(folder: Path, folders: Collection[Path]) -> str:
    """The last parts of its path, as many as tell it from the other ``folders``."""
    counts = range(1, len(folder.parts) + 1)
    ends = {count: folder.parts[-count:] for count in counts}
    alone = (end for count, end in ends.items() if sum(other.parts[-count:] == end for other in folders) == 1)
    return "/".join(next(alone))


def _read_run(folder: Path, name: str) -> Run:
    file = folder / METRICS_FILE
    _require_run(folder, file)
    curves, torn_lines = _read_metrics(file)
    if not curves:
        raise DataError(str(file), "holds no step yet", fix="wait for the run's first step, or name another run")
    given, defaults = _read_config(folder / CONFIG_FILE)
    facts = _whole(folder / DATA_FILE, Facts.model_validate_json) or Facts()
    return Run(name, curves, torn_lines, given, defaults, facts, _read_answers(folder / ANSWERS_FILE))


def _require_run(folder: Path, file: Path) -> None:
    if not folder.exists():
        raise DataError(str(folder), "there is no such folder", fix="name the folder of a run, such as runs/sft")
    if not folder.is_dir():
        raise DataError(str(folder), "is a file", fix=f"name its folder, {folder.parent}")
    if not file.is_file():
        runs = sorted(str(found.parent) for found in folder.glob(f"*/{METRICS_FILE}"))
        fix = f"name runs in it: {' '.join(runs)}" if runs else "name the folder of a run, such as runs/sft"
        raise DataError(str(folder), f"holds no {METRICS_FILE}", fix=fix)


def _read_metrics(file: Path) -> tuple[dict[str, Curve], int]:
    """The curves, and how many lines are torn. A step's last line counts, and is all that is known of the step."""
    steps, torn = array("q"), 0
    columns: dict[str, tuple[array[int], array[float]]] = defaultdict(lambda: (array("q"), array("d")))
    with file.open("rb") as lines:
        for line in lines:
            metrics = _metrics_of(line)
            if metrics is None:
                torn += line.endswith(b"\n") and not line.isspace()
                continue
            for key, value in metrics.items():
                if value is None or type(value) in (int, float):
                    rows, values = columns[key]
                    rows.append(len(steps))
                    values.append(np.nan if value is None else value)
            steps.append(metrics["step"])
    columns.pop("step", None)
    of_line = np.array(steps, np.int64)
    last = len(of_line) - 1 - np.unique(of_line[::-1], return_index=True)[1]
    counts = np.zeros(len(of_line), bool)
    counts[last] = True
    curves = {key: _curve(of_line, counts, *column) for key, column in columns.items()}
    return {key: curve for key, curve in curves.items() if len(curve.steps)}, torn


def _metrics_of(line: bytes) -> dict[str, Any] | None:
    """None for a line that a killed run did not finish."""
    try:
        metrics = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(metrics, dict) and type(metrics.get("step")) is int and 0 <= metrics["step"] < _STEP_LIMIT
    return metrics if whole else None


def _curve(steps: NDArray[np.int64], counts: NDArray[np.bool_], rows: Sequence[int], values: Sequence[float]) -> Curve:
    at, known = np.array(rows, np.int64), np.array(values, np.float64)
    at, known = at[counts[at]], known[counts[at]]
    order = np.argsort(steps[at])
    known[~np.isfinite(known)] = np.nan
    return Curve(steps[at][order], known[order])


def _read_config(file: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The keys given, and those that stand as comments, the defaults; without what is secret."""
    lines = (_whole(file, str) or "").split("\n")
    pairs = [line.partition(": ") for line in lines if ": " in line]
    given = {key: _shown(key, value) for key, _, value in pairs if not key.startswith("#")}
    defaults = {key[2:]: _shown(key, value) for key, _, value in pairs if key.startswith("# ")}
    return given, defaults


def _shown(key: str, text: str) -> str:
    try:
        return json.dumps(without_secret_values(json.loads(text), key=key), ensure_ascii=False)
    except ValueError:  # written by hand
        return str(without_secret_values(text, key=key))


def _read_answers(file: Path) -> tuple[Answer, ...]:
    last = {}
    for line in (_whole(file, str) or "").split("\n"):
        with suppress(ValueError):  # the last line of a run that was killed
            answer = Answer.model_validate_json(line)
            last[answer.step, answer.prompt] = answer
    return tuple(sorted(last.values(), key=attrgetter("step")))


def _whole(file: Path, read: Callable[[str], _Read]) -> _Read | None:
    """What ``read`` makes of the text of ``file``; None without a file, and with a warning where it cannot be read."""
    try:
        return read(file.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is left out of the report: %s", file, str(error).partition("\n")[0])
        return None
