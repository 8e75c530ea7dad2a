"""How the value of a key is read, by the type of the key and never by the look of the text.

The same readers serve the command line, YAML (whose scalars arrive as text) and plain Python values.
"""

import difflib
import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from burnish.config.flow import FlowError, Plain, parse_flow

_NONE = ("None", "null", "")
_TRUE = ("true", "yes", "1")
_FALSE = ("false", "no", "0")
_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")
_ANY_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]{0,999})")
_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}

Reader: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Words:
    """How the documentation names a type."""

    text: str


def unreadable(message: str, fix: str) -> PydanticCustomError:
    """The error of a value that cannot be read; ``{key}`` in ``fix`` becomes the dotted key."""
    return PydanticCustomError("unreadable", "{message}", {"message": message, "fix": fix})


@dataclass(frozen=True, slots=True)
class Limits:
    """What a number, or each number of a list, must satisfy, such as ``>= 1``."""

    rules: tuple[str, ...]

    def __call__(self, value: Any) -> Any:
        """``value`` itself; none passes."""
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not all(self._holds(number, rule) for rule in self.rules):
                wanted = " and ".join(self.rules)
                raise unreadable(f"{number} is not {wanted}", f"write a number {wanted}")
        return value

    @staticmethod
    def _holds(number: float, rule: str) -> bool:
        comparison, bound = rule.split()
        return bool(_COMPARISONS[comparison](number, float(bound)))


def within(*rules: str) -> AfterValidator:
    """Limits of a number key: ``within(">= 0", "< 1")``."""
    return AfterValidator(Limits(rules))


def read_text(value: Any) -> str:
    """Text as it stands; a path object as its text."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    raise unreadable(f"{_kind(value)} where text belongs", f"quote it: {{key}}={str(value)!r}")


def read_blank_text(value: Any) -> str:
    """Text whose "none" is the empty text."""
    return "" if is_none(value) else read_text(value)


def read_whole(value: Any) -> int:
    """A whole number; ``1e3`` is 1000, ``010`` is an error rather than 8 or 10."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if _WHOLE.fullmatch(text):
        return int(text)
    if isinstance(value, float) or _NUMBER.fullmatch(text):
        number = float(value)
        if number.is_integer() and abs(number) < 1e18:
            return int(number)
    raise unreadable(f"{_kind(value)} is not a whole number", "write digits, such as {key}=8")


def read_number(value: Any) -> float:
    """A finite number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    text = value.strip() if isinstance(value, str) else ""
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    raise unreadable(f"{_kind(value)} is not a finite number", "write a number, such as {key}=0.5 or {key}=1e-5")


def read_flag(value: Any) -> bool:
    """True or false."""
    word = str(value).strip().lower() if isinstance(value, (str, bool, int)) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise unreadable(f"{_kind(value)} is neither true nor false", "write {key}=true or {key}=false")


def none_or(read: Reader) -> Reader:
    """A reader for which ``None``, ``null`` and an empty text mean none."""
    return lambda value: None if is_none(value) else read(value)


def several(read: Reader) -> Reader:
    """A reader of a list; a bare value is a list of one, none is an empty list."""

    def read_several(value: Any) -> tuple[Any, ...]:
        if is_none(value):
            return ()
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = _parse(value, "['a', 'b'] or [a, b]")
        if isinstance(value, Mapping) or not isinstance(value, (list, tuple)):
            value = (value,)
        return tuple(read(item) for item in value)

    return read_several


def mapping_of(read: Reader) -> Reader:
    """A reader of a mapping with text keys; none is an empty mapping."""

    def read_mapping(value: Any) -> dict[str, Any]:
        if is_none(value):
            return {}
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = _parse(value, "{name: value, other: value}")
        if not isinstance(value, Mapping):
            raise unreadable(f"{_kind(value)} where a mapping belongs", "write {key}='{name: value}'")
        return {read_text(name): read(item) for name, item in value.items()}

    return read_mapping


def read_free(value: Any) -> Any:
    """A value of a mapping that is handed on: unquoted text is a number, flag, none, list or mapping if it looks so."""
    if isinstance(value, Plain):
        return _resolve(value)
    if isinstance(value, Mapping):
        return {read_text(name): read_free(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [read_free(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise unreadable(f"{_kind(value)} cannot be saved with the run", "use text, numbers, lists and mappings")


def read_callback(value: Any) -> str | dict[str, Any]:
    """A dotted path, or ``{path: kwargs}``."""
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        return read_text(value)
    entry = mapping_of(mapping_of(read_free))(value)
    if len(entry) != 1:
        raise unreadable(f"{len(entry)} callbacks in one entry", "write {key}='[a.B, {c.D: {every: 3}}]'")
    return dict(entry)


def word_of(kind: type[StrEnum]) -> Reader:
    """A reader of one word of a fixed set."""

    def read_word(value: Any) -> StrEnum:
        words = [str(member) for member in kind]
        if isinstance(value, str) and value in words:
            return kind(value)
        near = difflib.get_close_matches(str(value), words, n=1) or words[:1]
        raise unreadable(f"{_kind(value)} is none of {', '.join(words)}", f"write {{key}}={near[0]}")

    return read_word


def one_of(kind: type[StrEnum]) -> BeforeValidator:
    """The annotation of a key that holds one word of ``kind``."""
    return BeforeValidator(word_of(kind))


def is_none(value: Any) -> bool:
    """Whether ``value`` means none for a key that may be none."""
    return value is None or (isinstance(value, str) and value in _NONE)


def _resolve(text: Plain) -> Any:
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    if is_none(text):
        return None
    if _ANY_WHOLE.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if text[0] in "[{":
        return read_free(_parse(text, "[a, b] or {name: value}"))
    return str(text)


def _parse(text: str, spelling: str) -> Any:
    try:
        return parse_flow(text)
    except FlowError as error:
        raise unreadable(f"{str(text)!r} cannot be read: {error}", f"write {spelling}") from None


def _kind(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str) else f"{value!r} ({type(value).__name__})"


Text: TypeAlias = Annotated[str, BeforeValidator(read_text), Words("text")]
BlankText: TypeAlias = Annotated[str, BeforeValidator(read_blank_text), Words("text")]
OptionalText: TypeAlias = Annotated[str | None, BeforeValidator(none_or(read_text)), Words("text or none")]
Whole: TypeAlias = Annotated[int, BeforeValidator(read_whole), Words("whole number")]
OptionalWhole: TypeAlias = Annotated[int | None, BeforeValidator(none_or(read_whole)), Words("whole number or none")]
Number: TypeAlias = Annotated[float, BeforeValidator(read_number), Words("number")]
Flag: TypeAlias = Annotated[bool, BeforeValidator(read_flag), Words("true or false")]
Texts: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(several(read_text)), Words("list of text")]
Numbers: TypeAlias = Annotated[tuple[float, ...], BeforeValidator(several(read_number)), Words("list of numbers")]
Free: TypeAlias = Annotated[Mapping[str, Any], BeforeValidator(mapping_of(read_free)), Words("mapping")]
OptionalFree: TypeAlias = Annotated[
    Mapping[str, Any] | None, BeforeValidator(none_or(mapping_of(read_free))), Words("mapping or none")
]
Callbacks: TypeAlias = Annotated[
    tuple[str | Mapping[str, Any], ...],
    BeforeValidator(several(read_callback)),
    Words("list of paths or {path: kwargs}"),
]
