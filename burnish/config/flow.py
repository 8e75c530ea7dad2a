"""Lists and mappings written in one line, in Python's or YAML's spelling: ``['a', 'b']``, ``[a, b]``, ``{n: 40}``.

Its rule: nothing is cut, converted or guessed. Unquoted text comes back whole as ``Plain``, so that brackets, colons,
``#`` and blanks inside a path or a slice (``[train[:100]]``) stay where they are; YAML would refuse or end it there.
"""

import json
import re
from typing import Any

from burnish.errors import Problem

_QUOTED = re.compile(r"""'(?:[^'\\]|''|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_CLOSER = {"[": "]", "{": "}"}
_SPELLING = {"[": "write ['a', 'b'] or [a, b]", "{": "write {name: value, other: value}"}


class Plain(str):
    """Text that was written without quotes, so that a value of a free mapping may be read as a number."""

    __slots__ = ()


class ReadError(ValueError):
    """A value that cannot be read, and what to write instead; ``{key}`` in ``fix`` stands for the dotted key."""

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(message)
        self.fix = fix

    def problem(self, key: str, *, value: Any) -> Problem:
        """The same of ``key``."""
        return Problem(key, value, str(self), self.fix.replace("{key}", key))


def parse_flow(text: str) -> Any:
    """The list or dict that ``text`` spells; its scalars are ``Plain`` where unquoted, ``str`` where quoted.

    Raises:
        ReadError: brackets or quotes do not close, an item is empty, or something follows the end.
    """
    text = text.strip()
    try:
        value, rest = _items(text)
        if rest:
            raise ValueError(f"{rest!r} follows the end")
    except (ValueError, RecursionError) as error:
        raise ReadError(f"cannot be read: {error}", fix=_SPELLING[text[0]]) from None
    return value


def _items(text: str) -> tuple[Any, str]:
    """The list or mapping that ``text`` begins with, and what follows it."""
    closer = _CLOSER[text[0]]
    pairs: dict[str, Any] = {}
    items: list[Any] = []
    rest = text[1:].lstrip()
    while not rest.startswith(closer):
        if not rest:
            raise ValueError(f"the closing {closer!r} is missing")
        if closer == "}":
            rest = _add_pair(pairs, rest)
        else:
            item, rest = _value(rest, stops=",]")
            if item == "" and isinstance(item, Plain):
                raise ValueError("an item is empty")
            items.append(item)
        if rest.startswith(","):
            rest = rest[1:].lstrip()
        elif rest and not rest.startswith(closer):
            raise ValueError(f"{rest!r} follows a closed item")
    return pairs if closer == "}" else items, rest[1:].lstrip()


def _add_pair(pairs: dict[str, Any], text: str) -> str:
    """Add the ``key: value`` that ``text`` begins with to ``pairs``; what follows it."""
    key, rest = _value(text, stops=":,}")
    if not isinstance(key, str) or not rest.startswith(":"):
        raise ValueError(f"{key!r} is not followed by ': value'")
    if key in pairs:
        raise ValueError(f"{key!r} is given twice")
    pairs[str(key)], rest = _value(rest[1:].lstrip(), stops=",}")
    return rest


def _value(text: str, *, stops: str) -> tuple[Any, str]:
    """The value that ``text`` begins with, up to one of ``stops`` where it is unquoted, and what follows it."""
    if text.startswith(("[", "{")):
        return _items(text)
    if quoted := _QUOTED.match(text):
        return _unquote(quoted[0]), text[quoted.end() :].lstrip()
    if text.startswith(("'", '"')):
        raise ValueError(f"the closing {text[0]} is missing")
    depth = 0
    for at, character in enumerate(text):
        if depth == 0 and character in stops:
            return Plain(text[:at].rstrip()), text[at:]
        depth = max(0, depth + (character in "[{") - (character in "]}"))
    return Plain(text.rstrip()), ""


def _unquote(token: str) -> str:
    if token[0] == "'":
        # Python's and YAML's spelling of a quote; any other backslash is itself, as in YAML.
        return re.sub(r"\\([\\'])|''", lambda match: match[1] or "'", token[1:-1])
    return str(json.loads(token, strict=False))
