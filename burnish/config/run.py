"""SFTConfig: every key of a run, flat at the root, with sections for the model, the placement and the backends."""

import json
import re
from collections.abc import Iterator
from functools import reduce
from operator import attrgetter, getitem
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationError

from burnish.config.data import DataKeys
from burnish.config.loop import BatchKeys, CheckpointKeys, EvalKeys, LogKeys
from burnish.config.model import ModelConfig
from burnish.config.optimizer import OptimizerConfig
from burnish.config.parallel import FsdpConfig, MegatronConfig, PlacementConfig
from burnish.config.section import Section, explain, keys_of, sections_of
from burnish.errors import ConfigError, without_secret_values

Broken: TypeAlias = tuple[str, str, str]
"""A rule that a config breaks: the dotted key, what is wrong with its value, and what to write instead."""
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


class RunKeys(Section):
    """Model, optimizer and devices"""

    model: ModelConfig
    optimizer_config: OptimizerConfig = OptimizerConfig()
    strategy: Literal["fsdp", "megatron"] = "fsdp"
    """The backend: FSDP2 or Megatron Core."""
    placement: PlacementConfig = PlacementConfig()
    launcher: Literal["local", "ray"] = "local"
    """Who starts the processes: this command, or Ray on its cluster; under torchrun or SLURM this is a rank already."""
    sequence_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each row's tokens (Ulysses), on FSDP only."""
    fsdp_config: FsdpConfig = FsdpConfig()
    megatron_config: MegatronConfig = MegatronConfig()


class SFTConfig(LogKeys, CheckpointKeys, EvalKeys, BatchKeys, DataKeys, RunKeys):
    """Everything that decides a run. Sections are given as mappings: ``SFTConfig(model={"path": "..."})``.

    Raises:
        ConfigError: keys that do not exist or values that cannot be read, all of them at once.
            The rules between keys are checked by ``find_problems``.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**({"model": {}} | values))
        except ValidationError as error:
            raise ConfigError(explain(error, known=[*key_names(), *sections_of(SFTConfig)])) from None

    @property
    def explicit_keys(self) -> frozenset[str]:
        """Dotted names of the keys that were given a value, be it the default."""
        return frozenset(_explicit(self))

    def to_plain(self) -> dict[str, Any]:
        """Every key and its value, JSON-ready; ``SFTConfig(**plain)`` is equal to this config."""
        return self.model_dump(mode="json")

    def to_public(self) -> dict[str, Any]:
        """The value of every dotted key, JSON-ready, without secrets."""
        plain = without_secret_values(self.to_plain())
        return {name: reduce(getitem, name.split("."), plain) for name in key_names()}

    def to_yaml(self) -> str:
        """The effective config, a dotted key a line: those given, then the defaults as comments. It reads back."""
        explicit = self.explicit_keys
        lines = {name: f"{name}: {_one_line(attrgetter(name)(self))}" for name in key_names()}
        given = [lines[name] for name in lines if name in explicit]
        defaults = [f"# {lines[name]}" for name in lines if name not in explicit]
        return "\n".join([*given, "", "# defaults", *defaults, ""])


def key_names() -> tuple[str, ...]:
    """The dotted name of every key that holds a value."""
    return tuple(keys_of(SFTConfig))


def _explicit(section: Section, prefix: str = "") -> Iterator[str]:
    for name in section.model_fields_set:
        value = attrgetter(name)(section)
        if isinstance(value, Section):
            yield from _explicit(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _one_line(value: Any) -> str:
    """JSON that YAML reads alike: escaped where YAML would break or refuse the line, but not into surrogate pairs."""
    return _NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
