"""What each command does: read its config, call one function of the API, print the result, return the exit status."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burnish.config import Purpose, SFTConfig, load_config
from burnish.config.read import is_assignment
from burnish.config.rules_devices import environment_rank
from burnish.config.values import read_whole
from burnish.errors import ConfigError, Problem

_DONE, _WRONG_INPUT = 0, 2


@dataclass(frozen=True, slots=True)
class Request:
    """The words of a command, sorted."""

    first: str
    """What stands before the config where a command has such: a checkpoint, or what to inspect."""
    second: str
    """RUN.yaml, or the store or the step to inspect."""
    overrides: tuple[str, ...]
    """``key=value`` of config keys."""
    own: Mapping[str, str]
    """The command's own keys."""
    as_json: bool

    def config(self, purpose: Purpose = Purpose.TRAIN, *, defaults: tuple[str, ...] = ()) -> SFTConfig:
        """The config these words name, ``defaults`` before them."""
        return load_config(Path(self.second) if self.second else None, (*defaults, *self.overrides), purpose=purpose)

    def required(self, key: str) -> str:
        """The value of one of the command's own keys that must be there."""
        if not self.own.get(key):
            raise ConfigError([Problem(key, self.own.get(key), "is required", f"write {key}=...")])
        return self.own[key]

    def local_path(self, key: str) -> Path:
        """The same as a local path."""
        path = self.required(key)
        if "://" in path:
            raise ConfigError([Problem(key, path, "is no local path", "give a local path")])
        return Path(path)

    def whole(self, key: str) -> int | None:
        """The same as a number; none when not given."""
        return _whole(key, self.own[key]) if key in self.own else None


def train(request: Request) -> int:
    """Train."""
    config = request.config()
    from burnish import api

    return api.train(config)


def check(request: Request) -> int:
    """Say what is wrong, or what the run would do."""
    settings: dict[str, Any] = dict(request.own)
    if "mfu" in settings:
        settings["mfu"] = _number("mfu", settings["mfu"], float)
        if not 0 < settings["mfu"] <= 1:
            raise ConfigError(
                [Problem("mfu", settings["mfu"], "is no share", "write a number up to 1, such as mfu=0.4")]
            )
    try:
        config = request.config()
    except ConfigError as error:
        if not request.as_json:
            raise
        from burnish.inspect.plan import CheckReport

        _print_json(CheckReport(problems=error.problems).to_json())
        return _WRONG_INPUT
    from burnish import api

    with _only_result_on_stdout():
        report = api.check(config, **settings)
    if request.as_json:
        _print_json(report.to_json())
    else:
        print(report.to_text(), file=sys.stderr if report.problems else sys.stdout)
    return _WRONG_INPUT if report.problems else _DONE


def tokenize(request: Request) -> int:
    """Write the training data as stores."""
    out = request.required("out")
    config = request.config(Purpose.TOKENIZE)
    from burnish import api

    with _only_result_on_stdout():
        places = api.tokenize(config, out=out)
    print(*places, sep="\n")
    return _DONE


def inspect(request: Request) -> int:
    """Show rows, the rows of a step, or stats."""
    if request.first == "step":
        return _inspect_step(request)
    if request.as_json:
        raise ConfigError([Problem("--json", True, "is for burnish inspect step", "leave it out")])
    if request.first == "stats":
        return _inspect_stats(request)
    if request.first != "rows":
        fix = "write burnish inspect rows, step N, or stats STORE, and RUN.yaml after rows and step N"
        raise ConfigError([Problem("inspect", request.first or None, "is to be told what to show", fix)])
    row, sample = request.whole("row"), request.whole("sample")
    if None not in (row, sample):
        raise ConfigError([Problem("sample", sample, f"is given beside row={row}", "give one of them")])
    html = request.local_path("html") if "html" in request.own else None
    config = request.config()
    from burnish.inspect.rows import show_rows

    show_rows(config, row=row, sample=sample, html=html)
    if html:
        print(html)
    return _DONE


def _inspect_step(request: Request) -> int:
    try:
        step = read_whole(request.second)
    except ValueError as error:
        fix = "write its number, such as burnish inspect step 8"
        raise ConfigError([Problem("inspect step", request.second, str(error), fix)]) from None
    for key, value in request.own.items():
        raise ConfigError([Problem(key, value, "is for burnish inspect rows", "leave it out")])
    file = request.overrides[:1] if request.overrides and not is_assignment(request.overrides[0]) else ()
    config = replace(request, second="".join(file), overrides=request.overrides[len(file) :]).config()
    from burnish.inspect.step import trace_step

    with _only_result_on_stdout():
        trace = trace_step(config, step)
    if request.as_json:
        _print_json(trace.to_json())
    else:
        print(trace.to_text())
    return _DONE


def _inspect_stats(request: Request) -> int:
    if not request.second:
        fix = "write burnish inspect stats PATH, or the s3:// or gs:// URI of a store"
        raise ConfigError([Problem("inspect stats", None, "names no store", fix)])
    given = dict(word.split("=", 1) for word in request.overrides)
    if unknown := [key for key in given if key not in ("max_length", "cache_dir")]:
        raise ConfigError(
            [Problem(unknown[0], given[unknown[0]], "is no key of inspect stats", "give max_length or cache_dir")]
        )
    max_length = _whole("max_length", given["max_length"]) if "max_length" in given else None
    from burnish.data.store import open_store
    from burnish.inspect.stats import show_stats

    show_stats(open_store(request.second, name=request.second, max_length=max_length, cache_dir=given.get("cache_dir")))
    return _DONE


def evaluate(request: Request) -> int:
    """Evaluate."""
    config = request.config(Purpose.EVALUATE)
    from burnish import api

    with _only_result_on_stdout():
        metrics = api.evaluate(config)
    if environment_rank(os.environ) > 0:
        return _DONE
    if request.as_json:
        _print_json(metrics)
        return _DONE
    for name, values in metrics.items():
        print(name, *(f"{key}={value:.6g}" for key, value in values.items()), sep="  ")
    return _DONE


def bench(request: Request) -> int:
    """Measure throughput."""
    kinds = {"mean": int, "cv": float, "targets": float, "vocabulary": int, "warmup": int, "steps": int}
    own: dict[str, Any] = dict(request.own)
    own |= {key: _number(key, text, kinds[key]) for key, text in request.own.items() if key in kinds}
    from burnish import api
    from burnish.bench.measure import BUILT_IN, BenchSettings

    named = request.second or any(word.partition("=")[0] in ("model", "model.path") for word in request.overrides)
    config = request.config(Purpose.BENCH, defaults=() if named else (f"model.path={BUILT_IN}",))
    with _only_result_on_stdout():
        report = api.bench(config, BenchSettings(**own))
    if request.as_json:
        _print_json(report.to_json())
    else:
        print(report.to_text())
    return _DONE


def export(request: Request) -> int:
    """Write a checkpoint as a Hugging Face folder."""
    if not request.first:
        raise ConfigError([Problem("CHECKPOINT", None, "is missing", "give the path or URI of a global_step_N folder")])
    out = request.local_path("out")
    from burnish import api

    with _only_result_on_stdout():
        folder = api.export(request.first, out=out)
    print(folder)
    return _DONE


def report(request: Request) -> int:
    """Write the page of runs."""
    out = request.local_path("out") if "out" in request.own else None
    from burnish.report.page import write_report

    print(write_report([Path(word) for word in (request.second, *request.overrides) if word], out=out))
    return _DONE


def _whole(key: str, value: str) -> int:
    try:
        return read_whole(value)
    except ValueError as error:
        raise ConfigError([Problem(key, value, str(error), f"write digits, such as {key}=8")]) from None


def _number(key: str, value: str, kind: type[int] | type[float]) -> Any:
    if kind is int:
        return _whole(key, value)
    try:
        return float(value)
    except ValueError:
        raise ConfigError([Problem(key, value, "is no number", f"write {key}=0.5")]) from None


@contextlib.contextmanager
def _only_result_on_stdout() -> Iterator[None]:
    """Whatever is printed on the way goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(_finite(value), default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    """``value`` with null for numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
