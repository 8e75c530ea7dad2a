"""Lists and mappings written in one line, in Python's or YAML's spelling: ``['a', 'b']``, ``[a, b]``, ``{n: 40}``.

Its rule: nothing is cut, converted or guessed. Unquoted text comes back whole as ``Plain``, so that brackets, colons,
``#`` and blanks inside a path or a slice (``[train[:100]]``) stay where they are.
"""

import json
import re
from typing import Any

_CLOSER = {"[": "]", "{": "}"}
_MAX_DEPTH = 20


class Plain(str):
    """Text that was written without quotes, so that a value of a free mapping may be read as a number."""

    __slots__ = ()


class FlowError(ValueError):
    """The text is not a list or mapping; the message says what is wrong with it."""


def parse_flow(text: str) -> Any:
    """The list or dict that ``text`` spells; its scalars are ``Plain`` where unquoted, ``str`` where quoted.

    Raises:
        FlowError: brackets or quotes do not close, an item is empty, or something follows the end.
    """
    reader = _Reader(text)
    value = reader.value(stops="")
    reader.skip_blanks()
    if reader.at != len(text):
        raise FlowError(f"{text[reader.at :]!r} follows the end")
    return value


class _Reader:
    """Reads ``text`` from position ``at`` on."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def skip_blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def peek(self) -> str:
        """The next character that is no blank; empty at the end."""
        self.skip_blanks()
        return self.text[self.at : self.at + 1]

    def value(self, *, stops: str) -> Any:
        """The value that begins here, up to one of ``stops``."""
        first = self.peek()
        if first in ("'", '"'):
            return self._quoted(first)
        if first not in ("[", "{"):
            return self._plain(stops)
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise FlowError(f"more than {_MAX_DEPTH} levels of brackets")
        self.at += 1
        value = self._list() if first == "[" else self._mapping()
        self.depth -= 1
        return value

    def _list(self) -> list[Any]:
        items = []
        while not self._closes("]"):
            items.append(self.value(stops=",]"))
            if isinstance(items[-1], Plain) and not items[-1]:
                raise FlowError("an item is empty")
            self._separate("]")
        return items

    def _mapping(self) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not self._closes("}"):
            key = self.value(stops=":,}")
            if not isinstance(key, str) or self.peek() != ":":
                raise FlowError(f"{key!r} is not followed by ': value'")
            if key in items:
                raise FlowError(f"{key!r} is given twice")
            self.at += 1
            items[str(key)] = self.value(stops=",}")
            self._separate("}")
        return items

    def _closes(self, closer: str) -> bool:
        if self.peek() != closer:
            return False
        self.at += 1
        return True

    def _separate(self, closer: str) -> None:
        """Step over the comma after an item; stay before ``closer``."""
        found = self.peek()
        if found == ",":
            self.at += 1
        elif found == "":
            raise FlowError(f"the closing {closer!r} is missing")
        elif found != closer:
            raise FlowError(f"{self.text[self.at :]!r} follows a closed item")

    def _plain(self, stops: str) -> Plain:
        start = self.at
        open_brackets: list[str] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if not open_brackets and character in stops:
                break
            if open_brackets and character == open_brackets[-1]:
                open_brackets.pop()
            elif character in _CLOSER:
                open_brackets.append(_CLOSER[character])
            self.at += 1
        return Plain(self.text[start : self.at].strip())

    def _quoted(self, quote: str) -> str:
        start = self.at
        self.at += 1
        while self.at < len(self.text):
            two = self.text[self.at : self.at + 2]
            if two[0] == "\\" or (quote == "'" and two == "''"):
                self.at += 2
            elif two[0] == quote:
                self.at += 1
                return _unquote(self.text[start : self.at])
            else:
                self.at += 1
        raise FlowError(f"the closing {quote} is missing")


def _unquote(token: str) -> str:
    if token[0] == "'":
        # Python's and YAML's spelling of a quote; any other backslash is itself, as in YAML.
        return re.sub(r"\\([\\'])|''", lambda match: match[1] or "'", token[1:-1])
    try:
        return str(json.loads(token, strict=False))
    except ValueError:
        raise FlowError(f"{token} holds a backslash that escapes nothing; write \\\\ for a backslash") from None
