"""RUN.yaml and ``key=value`` become an SFTConfig. Its rule: all that is wrong is reported at once."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.config.check import find_problems
from burnish.config.choices import Purpose
from burnish.config.explain import nearest_key
from burnish.config.flow import FlowError, Plain, parse_flow
from burnish.config.run import SFTConfig, key_names
from burnish.config.section import section_at
from burnish.config.values import is_none
from burnish.config.yaml_file import Assignments, read_yaml
from burnish.errors import ConfigError, Problem
from burnish.log import get_logger

log = get_logger(__name__)

_ASSIGNMENT = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_RIVALS = {"num_steps": "num_epochs", "num_epochs": "num_steps"}
_ALIKE = 0.8
"""From this likeness on an unknown key is taken for a misspelling when looking for further problems."""


def is_assignment(word: str) -> bool:
    """Whether a word of the command line is ``key=value``, not a path."""
    return _ASSIGNMENT.fullmatch(word) is not None


def load_config(file: Path | None, overrides: Sequence[str] = (), *, purpose: Purpose = Purpose.TRAIN) -> SFTConfig:
    """The config that ``file`` and the ``key=value`` words after it give; a word changes its one value only.

    Raises:
        ConfigError: something cannot be read. It then also holds the rules between keys that the rest breaks;
            of a config that can be read ``find_problems`` tells those.
    """
    written = read_yaml(file, root=SFTConfig) if file is not None else Assignments()
    given = _read_words(overrides)
    problems = [*written.problems, *given.problems]
    values = _combine(written.values, given.values, problems)
    try:
        config = SFTConfig(**_tree(values))
    except ConfigError as error:
        problems.extend(error.problems)
    if problems:
        raise ConfigError([*problems, *_broken_rules(values, problems, purpose)])
    return config


def _read_words(words: Sequence[str]) -> Assignments:
    found = Assignments()
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            found.problems.append(Problem(word, None, "is not key=value", "write key=value, and RUN.yaml before them"))
            continue
        for name, value in _spread(match[1], Plain(match[2]), found.problems).items():
            if name in found.values:
                log.warning("%s is given twice; the last one counts: %s=%s", name, name, value)
            _assign(found.values, name, value)
    return found


def _combine(written: Mapping[str, Any], given: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """The values of the file, each replaced by that of the command line where it has one."""
    replaced = {
        rival
        for name, rival in _RIVALS.items()
        if not is_none(given.get(name)) and is_none(written.get(name)) and rival not in given
    }
    values: dict[str, Any] = {}
    for name, value in written.items():
        if name not in replaced:
            values |= _spread(name, value, problems)
    for name, value in given.items():
        _assign(values, name, value)
    for name in sorted(values):
        for parent in [parent for parent in values if name.startswith(f"{parent}.")]:
            values[parent] = _opened(parent, values[parent], problems)
    return values


def _spread(name: str, value: Any, problems: list[Problem]) -> dict[str, Any]:
    """A section that is given as one mapping as the keys in it; any other key as it is."""
    if section_at(SFTConfig, name) is None:
        return {name: value}
    leaves: dict[str, Any] = {}
    for inner, item in _opened(name, value, problems).items():
        leaves |= _spread(f"{name}.{inner}", item, problems)
    return leaves


def _opened(name: str, value: Any, problems: list[Problem]) -> dict[str, Any]:
    """The mapping that ``value`` is or spells."""
    message = "is not a mapping"
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = parse_flow(value)
        except FlowError as error:
            message = f"cannot be read: {error}"
    if isinstance(value, Mapping):
        return dict(value)
    if not is_none(value):
        problems.append(Problem(name, str(value), message, f"write {name}.key=value for the keys in it"))
    return {}


def _assign(values: dict[str, Any], name: str, value: Any) -> None:
    """Set ``name``, as the last of ``values``: a mapping given after one of its entries replaces that."""
    for other in [other for other in values if other == name or other.startswith(f"{name}.")]:
        del values[other]
    values[name] = value


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for name in sorted(values):
        *sections, last = name.split(".")
        place = tree
        for section in sections:
            place[section] = dict(place.get(section, {}))
            place = place[section]
        place[last] = values[name]
    return tree


def _broken_rules(values: Mapping[str, Any], problems: Sequence[Problem], purpose: Purpose) -> list[Problem]:
    """The rules between keys that hold no more, as far as the keys that could be read tell."""
    faulty = {problem.key for problem in problems}
    meant = {name: nearest_key(name, key_names()) for name in faulty if name in values and name not in key_names()}
    guesses = {key: values[name] for name, (key, likeness) in meant.items() if likeness >= _ALIKE and key not in values}
    sound = {name: value for name, value in values.items() if not _is_below(name, faulty)}
    for attempt in (sound | guesses, sound):
        try:
            config = SFTConfig(**_tree({"model.path": "unknown"} | attempt))
        except ConfigError:
            continue
        hidden = faulty - set(guesses)
        return [problem for problem in find_problems(config, purpose=purpose) if not _mentions(problem, hidden)]
    return []


def _is_below(name: str, faulty: set[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in faulty)


def _mentions(problem: Problem, keys: set[str]) -> bool:
    """Whether ``problem`` may come from the default that stands in for one of ``keys``."""
    words = set(re.findall(r"[\w.]*\w", f"{problem.key} {problem.message} {problem.fix}"))
    return bool(words & keys)
