"""A RUN.yaml becomes mappings, lists and text. Scalars stay text: the type of the key decides how one is read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from burnish.config.flow import Plain
from burnish.errors import Problem


def read_yaml(file: Path) -> tuple[dict[str, Any], list[Problem]]:
    """What ``file`` holds, and what is wrong with the writing."""
    reader = _Reader(file)
    try:
        values = reader.value(yaml.compose(file.read_bytes(), Loader=yaml.BaseLoader))
    except OSError as error:
        return {}, [Problem(str(file), None, f"cannot be read: {error.strerror}", "give the path of a file")]
    except (yaml.YAMLError, RecursionError) as error:
        return {}, [Problem(str(file), None, f"is not YAML: {error}", "quote texts with ': ' or ' #' in them")]
    if isinstance(values, dict) or values is None:
        return values or {}, reader.twice
    text = "holds a list or a text, not keys"
    return {}, [Problem(str(file), None, text, "write one 'key: value' a line")]


class _Reader:
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
                raise yaml.YAMLError(f"the key in line {line} is a list or a mapping")
            inner = f"{name}.{key.value}" if name else str(key.value)
            if inner in self.names:
                message = f"is given twice, again in {self.file}, line {line}"
                self.twice.append(Problem(inner, None, message, "keep one of them"))
            self.names.add(inner)
            yield str(key.value), inner, item
