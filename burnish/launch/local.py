"""A run on this machine: in this process, as the rank that this process is already, or in several new ones."""

import os

from burnish.assemble.model import world_size
from burnish.config import Purpose, SFTConfig, find_problems
from burnish.config.rules_devices import environment_rank, environment_world
from burnish.errors import ConfigError
from burnish.launch.spawn import spawn
from burnish.launch.tasks import TASKS, Outcome
from burnish.log import configure_logging


def run(config: SFTConfig, *, purpose: Purpose = Purpose.TRAIN) -> Outcome:
    """Train or evaluate what ``config`` says, to the end or to a signal.

    Raises:
        BurnishError: the config, the model, the data or a checkpoint is wrong.
        SystemExit: one of several ranks failed; why stands on stderr.
    """
    configure_logging(rank=environment_rank(os.environ))
    if environment_world(os.environ):
        return TASKS[purpose](config)
    if problems := find_problems(config, purpose=purpose):
        raise ConfigError(problems)
    processes = world_size(config)
    if processes == 1:
        return TASKS[purpose](config)
    return spawn(config, purpose=purpose, world_size=processes)
