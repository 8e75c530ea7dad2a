"""The rules between keys, and the refusal of what is not built yet. Looks at no file, no model and no device."""

import json
import os
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import chain
from operator import attrgetter, getitem
from typing import Any

from burnish.config.choices import Purpose
from burnish.config.rules_data import data_rules
from burnish.config.rules_devices import device_rules
from burnish.config.rules_loop import loop_rules
from burnish.config.run import Broken, SFTConfig
from burnish.errors import Problem, without_secrets

_MISSING: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("logger", "this tracker", ((), ("console",))),
    ("tags", "a tracker that keeps tags", ((),)),
    ("project_name", "a tracker that knows projects", ("burnish",)),
)
"""Key, feature, and the values that do not ask for it."""


def find_problems(
    config: SFTConfig,
    *,
    purpose: Purpose = Purpose.TRAIN,
    environment: Mapping[str, str] | None = None,
    num_devices: int = 0,
) -> list[Problem]:
    """Every rule that ``config`` breaks, then every key that asks for a feature that is not built yet.

    Args:
        config: what was read.
        purpose: training, evaluating and tokenizing need different data.
        environment: variables that torchrun and SLURM set; none is those of this process.
        num_devices: GPUs of this machine.
    """
    variables = os.environ if environment is None else environment
    rules = (
        data_rules(config, purpose),
        loop_rules(config, purpose),
        device_rules(config, variables, num_devices=num_devices),
    )
    broken = dict.fromkeys(chain(*rules, _refusals(config)))
    # A URI may hold a password, and problems are shown.
    plain = json.loads(without_secrets(json.dumps(config.to_plain())))
    return [Problem(key, reduce(getitem, key.split("."), plain), message, fix) for key, message, fix in broken]


def _refusals(config: SFTConfig) -> Iterator[Broken]:
    """What ``config`` asks for and is not there yet."""
    for key, feature, neutral in _MISSING:
        if attrgetter(key)(config) not in neutral:
            yield _refusal(key, feature)


def _refusal(key: str, feature: str) -> Broken:
    return key, f"{feature} is not built yet", "leave the key out"
