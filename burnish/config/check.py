"""The rules between keys, and the refusal of what is not built yet. Looks at no file, no model and no device."""

import os
from collections.abc import Mapping
from functools import reduce
from itertools import chain
from operator import getitem

from burnish.config.choices import Purpose
from burnish.config.not_built import refusals
from burnish.config.rules_data import data_rules
from burnish.config.rules_devices import device_rules
from burnish.config.rules_loop import loop_rules
from burnish.config.run import SFTConfig
from burnish.errors import Problem


def find_problems(
    config: SFTConfig, *, purpose: Purpose = Purpose.TRAIN, environment: Mapping[str, str] | None = None
) -> list[Problem]:
    """Every rule that ``config`` breaks, then every key that asks for a feature that is not built yet.

    Args:
        config: what was read.
        purpose: training, evaluating and tokenizing need different data.
        environment: variables that torchrun and SLURM set; none is those of this process.
    """
    variables = os.environ if environment is None else environment
    rules = (data_rules(config, purpose), loop_rules(config, purpose), device_rules(config, variables))
    broken = dict.fromkeys(chain(*rules, refusals(config, variables)))
    plain = config.to_plain()
    return [Problem(key, reduce(getitem, key.split("."), plain), message, fix) for key, message, fix in broken]
