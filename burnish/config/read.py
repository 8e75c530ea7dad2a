"""RUN.yaml and ``key=value`` become an SFTConfig. Its rule: all that is wrong is reported at once."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from burnish.config.check import find_problems
from burnish.config.choices import Purpose
from burnish.config.flow import Plain, ReadError
from burnish.config.run import SFTConfig, key_names
from burnish.config.section import key_instead, sections_of
from burnish.config.values import is_none, open_mapping
from burnish.errors import ConfigError, Problem
from burnish.log import get_logger

log = get_logger(__name__)

_ASSIGNMENT = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_RIVALS = (("num_steps", "num_epochs"), ("num_epochs", "num_steps"))
_SECTIONS = frozenset(sections_of(SFTConfig))


def is_assignment(word: str) -> bool:
    """Whether a word of the command line is ``key=value``, not a path."""
    return _ASSIGNMENT.fullmatch(word) is not None


def load_config(file: Path | None, overrides: Sequence[str] = (), *, purpose: Purpose = Purpose.TRAIN) -> SFTConfig:
    """The config that ``file`` and the ``key=value`` words after it give; a word changes its one value only.

    Raises:
        ConfigError: something cannot be read. It then also holds the rules between keys that the rest breaks;
            of a config that can be read ``find_problems`` tells those.
    """
    problems: list[Problem] = []
    given = _read_words(overrides, problems)
    written = _leaves(_read_yaml(file, problems) if file is not None else {}, problems)
    for name, rival in _RIVALS:
        if not is_none(given.get(name)) and rival not in given and is_none(written.get(name)):
            written.pop(rival, None)
    # A mapping stands before the keys in it, so that both count.
    values = [*sorted(written.items()), *given.items()]
    try:
        config = SFTConfig(**_tree(values, problems))
    except ConfigError as error:
        problems.extend(error.problems)
    if problems:
        raise ConfigError([*problems, *_broken_rules(values, problems, purpose)])
    return config


def _read_yaml(file: Path, problems: Sequence[Problem]) -> dict[str, Any]:
    """What ``file`` holds.

    Raises:
        ConfigError: it cannot be read, and of what was to be in it nothing is known; holds ``problems`` too.
    """
    reader = _Yaml(file)
    try:
        values = reader.value(yaml.compose(file.read_bytes(), Loader=yaml.BaseLoader))
        message, fix = "holds a list or a text, not keys", "write one 'key: value' a line"
    except OSError as error:
        values, message, fix = "", f"cannot be read: {error.strerror}", "give the path of a file"
    except (yaml.YAMLError, RecursionError) as error:
        values, (message, fix) = "", _not_yaml(error)
    if reader.twice or not (isinstance(values, dict) or values is None):
        raise ConfigError([*(reader.twice or [Problem(str(file), None, message, fix)]), *problems])
    return values or {}


def _not_yaml(error: Exception) -> tuple[str, str]:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"is not YAML: {error}", "write UTF-8 text, one 'key: value' a line"
    begun = f"{error.context} (line {error.context_mark.line + 1}): " if error.context_mark else ""
    fix = "see to brackets, quotes and indentation there and just before; quote texts with ': ' or ' #' in them"
    return f"line {error.problem_mark.line + 1} is not YAML: {begun}{error.problem}", fix


class _Yaml:
    """Turns the nodes of one file into values, and notes what is given twice."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.names: set[str] = set()
        self.twice: list[Problem] = []

    def value(self, node: yaml.Node | None, name: str = "") -> Any:
        """The value of ``node``; ``name`` is its dotted key."""
        if isinstance(node, yaml.MappingNode):
            return {key: self.value(item, inner) for key, inner, item in self._items(node, name)}
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, f"{name}[{index}]") for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.style is not None:
            return str(node.value)
        return None if node is None or node.value in ("", "~") else Plain(node.value)

    def _items(self, node: yaml.MappingNode, name: str) -> Iterator[tuple[str, str, yaml.Node]]:
        for key, item in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is a list or a mapping", problem_mark=key.start_mark)
            inner = f"{name}.{key.value}" if name else str(key.value)
            if inner in self.names:
                message = f"is given twice, again in {self.file}, line {line}"
                self.twice.append(Problem(inner, None, message, "keep one of them"))
            self.names.add(inner)
            yield str(key.value), inner, item


def _read_words(words: Sequence[str], problems: list[Problem]) -> dict[str, Any]:
    """Dotted keys and their values, in the order in which they count."""
    given: dict[str, Any] = {}
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            problems.append(Problem(word, None, "is not key=value", "write key=value, and RUN.yaml before them"))
            continue
        for name, value in _leaves({match[1]: Plain(match[2])}, problems).items():
            if name in given:
                log.warning("%s is given twice; the last one counts: %s=%s", name, name, value)
                del given[name]
            given[name] = value
    return given


def _leaves(values: Mapping[str, Any], problems: list[Problem], prefix: str = "") -> dict[str, Any]:
    """The dotted keys in ``values`` that hold a value themselves: sections are opened, other mappings are not."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        if name in _SECTIONS:
            leaves |= _leaves(_opened(name, value, problems), problems, f"{name}.")
        else:
            leaves[name] = value
    return leaves


def _tree(values: Sequence[tuple[str, Any]], problems: list[Problem]) -> dict[str, Any]:
    """Dotted keys as nested mappings; of one that comes twice the last counts."""
    tree: dict[str, Any] = {}
    for name, value in values:
        *parents, last = name.split(".")
        place = tree
        for depth, parent in enumerate(parents, start=1):
            place[parent] = _opened(".".join(parents[:depth]), place.get(parent), problems)
            place = place[parent]
        place[last] = value
    return tree


def _opened(name: str, value: Any, problems: list[Problem]) -> dict[str, Any]:
    try:
        if name in _SECTIONS:
            return open_mapping(value, fix=key_instead(name, known=key_names()))
        return open_mapping(value)
    except ReadError as error:
        problems.append(error.problem(name, value=value))
        return {}


def _broken_rules(values: Sequence[tuple[str, Any]], problems: Sequence[Problem], purpose: Purpose) -> list[Problem]:
    """The rules between keys that the rest breaks; one that speaks of a key which could not be read is not judged."""
    faulty = tuple(problem.key for problem in problems)
    sound = [pair for pair in values if not any(f"{pair[0]}.".startswith(f"{key}.") for key in faulty)]
    config = SFTConfig(**_tree([("model.path", "unknown"), *sound], []))
    unread = frozenset[str]().union(*map(_keys_in, problems))
    return [problem for problem in find_problems(config, purpose=purpose) if not unread & _keys_in(problem)]


def _keys_in(problem: Problem) -> frozenset[str]:
    """The keys that ``problem`` speaks of; for a key that does not exist that is the nearest one too."""
    words = re.findall(r"[\w.]*\w", f"{problem.key} {problem.message} {problem.fix}")
    return frozenset(words).intersection(key_names())
