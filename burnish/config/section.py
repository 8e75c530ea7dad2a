"""A section of the config: a frozen set of keys, each documented by the sentence below it."""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """Keys with their types and defaults; unknown keys are an error, and nothing changes once read."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the config."""

    name: str
    """Dotted, as on the command line."""
    field: FieldInfo


def keys_of(section: type[Section], *, prefix: str = "") -> Iterator[Key]:
    """Every key of ``section`` and of the sections in it that holds a value itself."""
    for name, field in section.model_fields.items():
        inner = section_in(field)
        if inner is None:
            yield Key(prefix + name, field)
        else:
            yield from keys_of(inner, prefix=f"{prefix}{name}.")


def sections_of(section: type[Section], *, prefix: str = "") -> Iterator[str]:
    """The dotted name of every section in ``section``."""
    for name, field in section.model_fields.items():
        inner = section_in(field)
        if inner is not None:
            yield prefix + name
            yield from sections_of(inner, prefix=f"{prefix}{name}.")


def section_at(root: type[Section], name: str) -> type[Section] | None:
    """The section that the dotted ``name`` leads to; none when it leads to a value or nowhere."""
    section = root
    for part in name.split("."):
        field = section.model_fields.get(part)
        inner = section_in(field) if field is not None else None
        if inner is None:
            return None
        section = inner
    return section


def section_in(field: FieldInfo) -> type[Section] | None:
    """The section that ``field`` holds; none when it holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None
