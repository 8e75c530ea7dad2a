"""All rules between keys at once. Looks at no file, no model and no device."""

import json
import os
from collections.abc import Mapping
from functools import reduce
from itertools import chain
from operator import getitem

from burnish.config.choices import Purpose
from burnish.config.rules_data import data_rules
from burnish.config.rules_devices import device_rules
from burnish.config.rules_loop import loop_rules
from burnish.config.run import SFTConfig
from burnish.errors import Problem, without_secrets


def find_problems(
    config: SFTConfig,
    *,
    purpose: Purpose = Purpose.TRAIN,
    environment: Mapping[str, str] | None = None,
    num_devices: int = 0,
) -> list[Problem]:
    """Every rule that ``config`` breaks.

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
    broken = dict.fromkeys(chain(*rules))
    # A URI may hold a password, and problems are shown.
    plain = json.loads(without_secrets(json.dumps(config.to_plain())))
    return [Problem(key, reduce(getitem, key.split("."), plain), message, fix) for key, message, fix in broken]
