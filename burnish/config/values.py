"""How a value is read: by the type of its key and never by the look of the text.

The same readers serve the command line, YAML (whose scalars arrive as text) and plain Python values.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from burnish.config.flow import Plain, ReadError, parse_flow

_NONE = ("None", "null", "")
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]{0,999})")
_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read_as(kind: Any, value: Any) -> Any:
    """``value`` as the type ``kind`` of a key, such as ``int | None`` or ``tuple[str, ...]``.

    Raises:
        ReadError: it is none.
    """
    shape = get_origin(kind)
    if shape is not None:
        return _SHAPES[shape](get_args(kind), value)
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    return kind(_read_word(tuple(kind), value)) if issubclass(kind, StrEnum) else value


def is_none(value: Any) -> bool:
    """Whether ``value`` means none for a key that may be none."""
    return value is None or (isinstance(value, str) and value in _NONE)


def read_text(value: Any) -> str:
    """Text as it stands; a path object as its text."""
    if isinstance(value, (str, os.PathLike)):
        return str(os.fspath(value))
    several = isinstance(value, (list, tuple, Mapping))
    fix = "write one text in its place, such as a path or name" if several else f"quote it: {{key}}={str(value)!r}"
    raise ReadError(f"{_described(value)} where text belongs", fix=fix)


def read_whole(value: Any) -> int:
    """A whole number; ``1e3`` is 1000, ``010`` is an error rather than 8 or 10."""
    number = _number(value)
    if number is not None and abs(number) < 10**18 and number == int(number):
        return int(number)
    raise ReadError(f"{_described(value)} is not a whole number", fix="write digits, such as {key}=8")


def read_number(value: Any) -> float:
    """A finite number."""
    number = _number(value)
    if number is not None and abs(number) <= sys.float_info.max:
        return float(number)
    raise ReadError(
        f"{_described(value)} is not a finite number", fix="write a number, such as {key}=0.5 or {key}=1e-5"
    )


def read_flag(value: Any) -> bool:
    """True or false."""
    word = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if word in _FLAGS:
        return _FLAGS[word]
    raise ReadError(f"{_described(value)} is neither true nor false", fix="write {key}=true or {key}=false")


def read_free(value: Any) -> Any:
    """A value that is handed on: unquoted text is a number, flag, none, list or mapping if it looks so."""
    if isinstance(value, Plain):
        return _resolve(value)
    if isinstance(value, Mapping):
        return {read_text(name): read_free(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [read_free(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ReadError(f"{_described(value)} cannot be saved with the run", fix="use text, numbers, lists and mappings")


def open_mapping(value: Any, *, fix: str = "write {key}='{name: value}'") -> dict[Any, Any]:
    """The mapping that ``value`` is or spells, its items as they are; none is an empty one."""
    value = {} if is_none(value) else _opened(value, "{")
    if isinstance(value, Mapping):
        return dict(value)
    raise ReadError(f"{_described(value)} where a mapping belongs", fix=fix)


def _read_several(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """A list; a bare value is a list of one, none is an empty list."""
    if is_none(value):
        return ()
    value = _opened(value, "[")
    return tuple(read_as(kinds[0], item) for item in (value if isinstance(value, (list, tuple)) else (value,)))


def _read_mapping(kinds: tuple[Any, ...], value: Any) -> dict[Any, Any]:
    return {read_as(kinds[0], name): read_as(kinds[1], item) for name, item in open_mapping(value).items()}


def _read_either(kinds: tuple[Any, ...], value: Any) -> Any:
    """``X | None``; or ``str | Mapping``, where the braces decide."""
    first, other = kinds
    if other is NoneType:
        return None if is_none(value) else read_as(first, value)
    value = _opened(value, "{")
    return read_as(other if isinstance(value, Mapping) else first, value)


def _read_word(words: tuple[str, ...], value: Any) -> str:
    """One word of a fixed set."""
    if value in words:
        return str(value)
    part_of = [word for word in words if str(value) in word or word in str(value)]
    near = part_of if len(part_of) == 1 else difflib.get_close_matches(str(value), words, n=1)
    fix = f"write {{key}}={near[0]}" if near else "write one of these"
    raise ReadError(f"{_described(value)} is none of {', '.join(words)}", fix=fix)


def _number(value: Any) -> int | float | None:
    """The number that ``value`` is or spells."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else None


def _resolve(text: Plain) -> Any:
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    if is_none(text):
        return None
    if (number := _number(text)) is not None:
        return number
    return read_free(parse_flow(text)) if text[0] in "[{" else str(text)


def _opened(value: Any, bracket: str) -> Any:
    """What ``value`` spells where it is text that begins with ``bracket``."""
    return parse_flow(value) if isinstance(value, str) and value.lstrip().startswith(bracket) else value


def _described(value: Any) -> str:
    return repr(value) if isinstance(value, str) else f"{value!r} ({type(value).__name__})"


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    str: read_text,
    int: read_whole,
    float: read_number,
    bool: read_flag,
    Any: read_free,
}
_SHAPES: dict[Any, Callable[[tuple[Any, ...], Any], Any]] = {
    tuple: _read_several,
    Mapping: _read_mapping,
    UnionType: _read_either,
    Union: _read_either,
    Literal: _read_word,
    Annotated: lambda kinds, value: read_as(kinds[0], value),
}
