"""Pydantic's findings become Problems: each with its dotted key, the value, and what to write instead."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from burnish.config.flow import ReadError
from burnish.errors import Problem

SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
"""Pydantic's names of limits."""
_ELSEWHERE = {
    "learning_rate": "optimizer_config.lr",
    "warmup_steps": "optimizer_config.num_warmup_steps",
    "gradient_checkpointing": "fsdp_config.activation_checkpointing",
    "output_dir": "ckpt_path",
    "save_steps": "ckpt_interval",
    "report_to": "logger",
}
"""What other trainers call a key, where nothing of the name is alike."""


def explain(error: ValidationError, *, known: Iterable[str]) -> list[Problem]:
    """One Problem for each finding; ``known`` are the dotted names an unknown key is compared with."""
    candidates = {key: key for key in known} | _ELSEWHERE
    return [_problem(finding, candidates) for finding in error.errors(include_url=False)]


def _problem(finding: Mapping[str, Any], candidates: Mapping[str, str]) -> Problem:
    # Of a list, the whole is the key's value.
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
            near = candidates[max(candidates, key=lambda candidate: _likeness(key, candidate))]
            return Problem(key, value, "there is no such key", f"write {near}, the nearest key there is")
        case "missing":
            return Problem(key, None, "is required", f"write {key}=...")
        case _:
            return Problem(key, value, "is a section, not a value", f"write {key}.name=value")


def _likeness(name: str, candidate: str) -> tuple[float, float]:
    """How alike two dotted names are, whole or in their last part."""
    whole = difflib.SequenceMatcher(None, name, candidate).ratio()
    last = difflib.SequenceMatcher(None, name.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
    return max(whole, last), whole + last
