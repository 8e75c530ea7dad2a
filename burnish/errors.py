"""Every error a user can cause or must act on. The command line prints them without a traceback and exits with 2.

* BurnishError
  - ConfigError       settings are wrong; holds every broken rule, each with its dotted key
  - DataError         a dataset, a store or a row is wrong; names the store, the file and the row
  - StorageError      bytes could not be read or written; names the path or URI
  - CheckpointError   a checkpoint is missing, incomplete or does not fit this run
  - LaunchError       the processes of a run could not be started

A text reads ``where: what is wrong, with the values`` and then ``fix: what to do``.
A broken assumption of our own code is an ``assert``, never one of these.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_IN_URL = re.compile(r"(?<=://)[^/\s'\"]*@")
_SIGNED = re.compile(r"([?&](?:X-(?:Amz|Goog)-\w+|sig|signature|token)=)[^&\s\"']+", re.IGNORECASE)
_SECRET_KEY = re.compile(r"(^|[._-])(password|passwd|secret|token|api_?key|access_?key|credentials?)$", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """``text`` with the user, password and signature of any URL in it left out."""
    return _SIGNED.sub(r"\1***", _IN_URL.sub("***@", text))


def without_secret_values(value: Any, *, key: str = "") -> Any:
    """JSON-ready ``value`` of ``key`` with ``***`` for what a key such as ``api_key`` holds, and no secret in any URL."""
    if value is not None and _SECRET_KEY.search(key):
        return "***"
    if isinstance(value, dict):
        return {name: without_secret_values(item, key=name) for name, item in value.items()}
    if isinstance(value, list):
        return [without_secret_values(item) for item in value]
    return without_secrets(value) if isinstance(value, str) else value


class BurnishError(Exception):
    """Base of all of them: ``where`` it is wrong, what the ``problem`` is, what ``fix`` mends it."""

    def __init__(self, where: str, problem: str, *, fix: str = "") -> None:
        where, problem = without_secrets(where), without_secrets(problem)
        super().__init__(f"{where}: {problem}" + (f"\n  fix: {fix}" if fix else ""))
        self.where = where
        self.problem = problem
        self.fix = fix

    def to_json(self) -> dict[str, str]:
        """JSON-ready; :func:`revived` undoes it."""
        return {"kind": type(self).__name__, "where": self.where, "problem": self.problem, "fix": self.fix}

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels between processes whole; an exception alone would forget what it was built with."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule of a config."""

    key: str
    """Dotted key, spelled as on the command line."""
    value: Any
    """The value it has."""
    message: str
    """What is wrong with it."""
    fix: str
    """What to write instead."""

    def __str__(self) -> str:
        value = "" if self.value is None else f"={self.value!r}"
        return f"{self.key}{value}: {self.message}\n    fix: {self.fix}"


class ConfigError(BurnishError):
    """Settings are wrong. Reports all broken rules of a config at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("config", count + "".join(f"\n  {problem}" for problem in problems))
        self.problems = tuple(problems)


class DataError(BurnishError):
    """A dataset, a store or one of its rows is wrong."""


class StorageError(BurnishError):
    """Bytes could not be read or written."""


class CheckpointError(BurnishError):
    """A checkpoint is missing, incomplete or does not fit this run."""


class LaunchError(BurnishError):
    """The processes of a run could not be started."""


def revived(told: Mapping[str, str]) -> BurnishError:
    """The error that another process told as JSON; of a config's problems the text alone."""
    kinds = {kind.__name__: kind for kind in (DataError, StorageError, CheckpointError, LaunchError)}
    return kinds.get(told["kind"], BurnishError)(told["where"], told["problem"], fix=told["fix"])
