"""Pydantic's findings become Problems: each with its dotted key, the value, and what to write instead."""

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from burnish.errors import Problem

_ELSEWHERE = {
    "learning_rate": "optimizer_config.lr",
    "warmup_steps": "optimizer_config.num_warmup_steps",
    "warmup_ratio": "optimizer_config.num_warmup_steps",
    "lr_scheduler_type": "optimizer_config.scheduler",
    "gradient_checkpointing": "fsdp_config.activation_checkpointing",
    "max_steps": "num_steps",
    "num_train_epochs": "num_epochs",
    "max_seq_length": "max_length",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "micro_train_batch_size_per_gpu",
    "output_dir": "ckpt_path",
    "save_steps": "ckpt_interval",
    "save_total_limit": "max_ckpts_to_keep",
    "eval_steps": "eval_interval",
    "resume_from_checkpoint": "resume_from",
    "report_to": "logger",
    "packing": "use_sequence_packing",
}
"""What other trainers call a key."""


def explain(error: ValidationError, *, known: Iterable[str]) -> list[Problem]:
    """One Problem for each finding; ``known`` are the dotted names an unknown key is compared with."""
    names = tuple(known)
    return [_problem(finding, names) for finding in error.errors(include_url=False)]


def nearest_key(name: str, known: Iterable[str]) -> tuple[str, float]:
    """The key that ``name`` most likely means, and how alike they are (0 to 1)."""
    candidates = {key: key for key in known} | _ELSEWHERE

    def likeness(candidate: str) -> tuple[float, float]:
        whole = _ratio(name, candidate)
        last = _ratio(name.rpartition(".")[2], candidate.rpartition(".")[2])
        return max(whole, last), whole + last

    best = max(candidates, key=likeness)
    return candidates[best], likeness(best)[0]


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def _problem(finding: Mapping[str, Any], known: tuple[str, ...]) -> Problem:
    key = ".".join(str(part) for part in finding["loc"])
    value = _bare(finding["input"])
    match finding["type"]:
        case "unreadable":
            details = finding["ctx"]
            return Problem(key, value, details["message"], details["fix"].replace("{key}", key))
        case "extra_forbidden":
            near = nearest_key(key, known)[0]
            return Problem(key, _brief(value), "there is no such key", f"write {near}, the nearest key there is")
        case "missing":
            return Problem(key, None, "is required", f"write {key}=...")
        case _:
            return Problem(key, value, "is a section, not a value", f"write {key}.name=value")


def _brief(value: Any) -> Any:
    """``value``, shortened where it is a whole tree of keys."""
    return reprlib.repr(value) if isinstance(value, (dict, list)) else value


def _bare(value: Any) -> Any:
    """``value`` without our own kinds of text."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _bare(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_bare(item) for item in value]
    return value
