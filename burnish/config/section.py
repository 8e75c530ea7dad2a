"""A section of the config: a frozen set of keys, each documented by the sentence below it."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from burnish.config.values import is_none, read_as


class Section(BaseModel):
    """Keys with their types and defaults; unknown keys are an error, and nothing changes once read."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        # A text that is empty by default means none by that.
        return "" if field.default == "" and is_none(value) else read_as(field.annotation, value)


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """Every key of ``section`` and of the sections in it that holds a value itself, by its dotted name."""
    return {name: field for name, field in _fields(section) if _section_in(field) is None}


def sections_of(section: type[Section]) -> list[str]:
    """The dotted name of every section in ``section``."""
    return [name for name, field in _fields(section) if _section_in(field) is not None]


def _fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        inner = _section_in(field)
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def _section_in(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None
