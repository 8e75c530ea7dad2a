"""Configs that are right, and what was said of those that are not."""

import pytest

from burnish.config import SFTConfig, find_problems, load_config
from burnish.errors import ConfigError, Problem

WORDS = ("model.path=m", "train_datasets=d.jsonl")


def load(*words: str) -> SFTConfig:
    """A whole config, with ``words`` on the command line."""
    return load_config(None, [*WORDS, *words])


def refused(*words: str) -> dict[str, Problem]:
    """The problems of ``load(*words)`` by key."""
    with pytest.raises(ConfigError) as error:
        load(*words)
    return {problem.key: problem for problem in error.value.problems}


def broken(*words: str, base: tuple[str, ...] = WORDS, **environment: str) -> dict[str, str]:
    """What the rules say of a config that can be read, by key."""
    config = load_config(None, [*base, *words])
    return {problem.key: problem.message for problem in find_problems(config, environment=environment)}
