"""A section of the config: a frozen set of keys, each documented by the sentence below it, and what it says of errors."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from burnish.config.flow import ReadError
from burnish.config.values import is_none, read_as
from burnish.errors import Problem

SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
"""Pydantic's names of limits."""
_ALIKE = 0.7
"""Names less alike than this have nothing to do with each other."""


class Section(BaseModel):
    """Keys with their types and defaults; unknown keys are an error, and nothing changes once read."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        if _section_in(field) and is_none(value):
            return {}
        # A text that is empty by default means none by that.
        return "" if field.default == "" and is_none(value) else read_as(field.annotation, value)


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """Every key of ``section`` and of the sections in it that holds a value itself, by its dotted name."""
    return {name: field for name, field in _fields(section) if _section_in(field) is None}


def sections_of(section: type[Section]) -> list[str]:
    """The dotted name of every section in ``section``."""
    return [name for name, field in _fields(section) if _section_in(field) is not None]


def _fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        inner = _section_in(field)
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def _section_in(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def explain(error: ValidationError, *, known: Iterable[str]) -> list[Problem]:
    """What pydantic found, as Problems; ``known`` are the dotted names that an unknown key is compared with."""
    candidates = {key: key for key in known} | _elsewhere()
    return [_problem(finding, candidates) for finding in error.errors(include_url=False)]


def _problem(finding: Mapping[str, Any], candidates: Mapping[str, str]) -> Problem:
    key = ".".join(part for part in finding["loc"] if isinstance(part, str))
    value, context = finding["input"], finding.get("ctx", {})
    match finding["type"]:
        case "value_error":
            unreadable: ReadError = context["error"]
            return unreadable.problem(key, value=value)
        case "greater_than_equal" | "greater_than" | "less_than_equal" | "less_than":
            [(name, bound)] = context.items()
            limit = f"{SIGNS[name]} {bound:g}"
            return Problem(key, value, f"{value} is not {limit}", f"write a number {limit}")
        case "extra_forbidden":
            return Problem(key, value, "there is no such key", _instead(key, candidates))
        case "missing":
            return Problem(key, None, "is required", f"write {key}=..., or name a RUN.yaml that has it")
        case _:
            return Problem(key, value, "is a section, not a value", key_instead(key, known=candidates))


def key_instead(section: str, *, known: Iterable[str]) -> str:
    """What to write where ``section`` was given a value: the first key of it, of the dotted names ``known``."""
    return f"write {next(name for name in known if name.startswith(f'{section}.'))}=... or another of its keys"


@cache
def _elsewhere() -> dict[str, str]:
    """What other trainers call a key: by their name ours, or a sentence."""
    table = yaml.safe_load(Path(__file__).with_name("elsewhere.yaml").read_text(encoding="utf-8"))
    return {name: ours for ours, names in table.items() for name in names.split()}


def _instead(key: str, candidates: Mapping[str, str]) -> str:
    last, nearest = key.rpartition(".")[2], partial(max, key=partial(_likeness, key))
    near = last if last in _elsewhere() else nearest(candidates)
    if max(_likeness(last, near)[0], _likeness(key, near)[0]) < _ALIKE:
        ours = nearest(name for name in candidates if name not in _elsewhere())
        return f"leave it out; burnish train --help lists all keys, the nearest in name is {ours}"
    found = candidates[near]
    return f"{found}; see docs/moving.md" if " " in found else f"write {found}, the nearest key there is"


def _likeness(name: str, candidate: str) -> tuple[float, float]:
    """How alike two dotted names are, whole or in their last part."""
    whole = difflib.SequenceMatcher(None, name, candidate).ratio()
    last = difflib.SequenceMatcher(None, name.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
    return max(whole, last), whole + last
