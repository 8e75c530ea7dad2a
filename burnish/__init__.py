"""Supervised fine-tuning of language models. The names below load on first use, so that importing costs nothing."""

from importlib import import_module
from typing import Any

_HOMES = {
    "SFTConfig": "burnish.config",
    "SFTTrainer": "burnish.api",
    "load_from_pretokenized": "burnish.api",
    "TrainOnWhat": "burnish.config",
    "DataMixingSampler": "burnish.data.samplers",
}

__all__ = ["DataMixingSampler", "SFTConfig", "SFTTrainer", "TrainOnWhat", "load_from_pretokenized"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'burnish' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
