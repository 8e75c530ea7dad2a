"""A RUN.yaml becomes dotted keys and values. Scalars stay text: the type of the key decides how one is read."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from burnish.config.flow import Plain
from burnish.config.section import Section, section_at
from burnish.errors import Problem


@dataclass(slots=True)
class Assignments:
    """Dotted keys with the values written for them, in order, and what was wrong with the writing."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(file: Path, *, root: type[Section]) -> Assignments:
    """What ``file`` assigns to the keys of ``root``; nested and dotted spelling are the same."""
    found = Assignments()
    try:
        node = yaml.compose(file.read_bytes(), Loader=yaml.BaseLoader)
    except OSError as error:
        found.problems.append(Problem(str(file), None, f"cannot be read: {error.strerror}", "give the path of a file"))
    except yaml.YAMLError as error:
        found.problems.append(
            Problem(str(file), None, f"is not YAML: {error}", "quote texts with ': ' or ' #' in them")
        )
    else:
        _Walk(file, root, found).document(node)
    return found


@dataclass(slots=True)
class _Walk:
    """Goes through the nodes of one file."""

    file: Path
    root: type[Section]
    found: Assignments
    lines: dict[str, int] = field(default_factory=dict)
    open_nodes: list[yaml.Node] = field(default_factory=list)

    def document(self, node: yaml.Node | None) -> None:
        if isinstance(node, yaml.MappingNode):
            self._section(node, "")
        elif node is not None:
            text = "holds a list or a text, not keys"
            self.found.problems.append(Problem(str(self.file), None, text, "write one 'key: value' a line"))

    def _section(self, node: yaml.MappingNode, prefix: str) -> None:
        for key, value in node.value:
            name = prefix + self._name(key)
            if section_at(self.root, name) is None:
                if self._is_new(name, key):
                    self.found.values[name] = self._value(value, name)
            elif isinstance(value, yaml.MappingNode):
                if self._is_new(name, key):
                    self._section(value, f"{name}.")
            elif not _is_empty(value):
                self.found.values[name] = self._value(value, name)

    def _value(self, node: yaml.Node, name: str) -> Any:
        if isinstance(node, yaml.ScalarNode):
            if node.style is not None:
                return str(node.value)
            return None if _is_empty(node) else Plain(node.value)
        if any(node is outer for outer in self.open_nodes):
            self._report(name, node, "holds itself", "write the value out")
            return None
        self.open_nodes.append(node)
        value = self._list(node, name) if isinstance(node, yaml.SequenceNode) else self._mapping(node, name)
        self.open_nodes.pop()
        return value

    def _list(self, node: yaml.SequenceNode, name: str) -> list[Any]:
        return [self._value(item, name) for item in node.value]

    def _mapping(self, node: yaml.Node, name: str) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key, item in node.value:
            inner = self._name(key)
            if inner in value:
                self._report(f"{name}.{inner}", key, "is given twice", "keep one of them")
            value[inner] = self._value(item, f"{name}.{inner}")
        return value

    def _name(self, key: yaml.Node) -> str:
        if isinstance(key, yaml.ScalarNode):
            return str(key.value)
        self._report(str(self.file), key, "has a key that is a list or a mapping", "write keys as text")
        return "?"

    def _is_new(self, name: str, key: yaml.Node) -> bool:
        if name in self.lines:
            self._report(name, key, f"is given twice, first in line {self.lines[name]}", "keep one of them")
            return False
        self.lines[name] = key.start_mark.line + 1
        return True

    def _report(self, name: str, node: yaml.Node, message: str, fix: str) -> None:
        value = node.value if isinstance(node, yaml.ScalarNode) else None
        where = f"{self.file}, line {node.start_mark.line + 1}"
        self.found.problems.append(Problem(name, value, f"{message} ({where})", fix))


def _is_empty(node: yaml.Node) -> bool:
    """Whether YAML means nothing by an unquoted scalar."""
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "~")
