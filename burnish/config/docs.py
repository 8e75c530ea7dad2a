"""The config classes and the error classes become ``--help``, docs/config.md and docs/errors.md.

``python -m burnish.config.docs [FOLDER]`` writes the two pages.
"""

import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from burnish import errors
from burnish.config.data import DataKeys
from burnish.config.loop import BatchKeys, CheckpointKeys, EvalKeys, LogKeys
from burnish.config.run import RunKeys
from burnish.config.section import SIGNS, Section, keys_of

_GROUPS: tuple[type[Section], ...] = (RunKeys, DataKeys, BatchKeys, EvalKeys, CheckpointKeys, LogKeys)

_CONFIG_PAGE = """\
# Config keys

Generated from the config classes by `python -m burnish.config.docs`; do not edit.

A RUN.yaml holds these keys, nested or dotted. `key=value` on the command line replaces one value and nothing beside it;
of a key given twice there the last counts, with a notice. `num_steps` on the command line replaces `num_epochs` of the
file, and the other way round.

* A value is read by the type of its key: text is everything after the first `=`, so `run_name=007` is `007`.
* `None` and `null` mean none for a key that may be none; for a list they mean the empty list; `resume_from=` is empty.
* Lists and mappings take Python's and YAML's spelling: `"['a','b']"`, `[a, b]`, `'{n: 40}'`. A bare value is a list of one.
* Whole numbers may be written `1e3`; a leading zero is an error. Flags are true, false, yes, no, 1 or 0.
* In a mapping that is passed on (such as `sampler_kwargs`), unquoted text that looks like a number or a flag is one.
* `data/val` in `eval_datasets` is a hub id, and its eval set `data_val`; `./data/val` is a folder, and its eval set `val`.
"""
_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", NoneType: "none", Any: "value"}

_ERRORS_PAGE = """\
# Errors and exit codes

Generated from the error classes by `python -m burnish.config.docs`; do not edit.

A text reads `where: what is wrong, with the values`, then `fix: what to do` ([an example](quickstart.md#when-something-is-wrong)).

| class | below | when |
|---|---|---|
{classes}

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a fault of Burnish; the traceback is printed |
| 2 | something to mend in the config, the data, the storage, a checkpoint or the launch; the message is printed |
| 130 | interrupted by SIGINT, after saving |
| 143 | stopped by SIGTERM, after saving |
"""


class KeyText(NamedTuple):
    """One key, as it is documented."""

    name: str
    kind: str
    default: str
    sentence: str


def key_groups() -> Iterator[tuple[str, list[KeyText]]]:
    """(title, keys) of each part of the config."""
    for group in _GROUPS:
        yield (
            _sentence(group),
            [
                KeyText(name, _kind(field.annotation, field.metadata), _default(field), field.description or "")
                for name, field in keys_of(group).items()
            ],
        )


def help_text() -> str:
    """Every key with its default and its sentence, for a terminal."""
    lines = []
    for title, keys in key_groups():
        lines += ["", f"{title}:"]
        for key in keys:
            default = key.default if key.default == "required" else f"default {key.default}"
            lines += [f"  {key.name}   ({key.kind}; {default})", f"      {key.sentence}"]
    return "\n".join(lines)


def config_page() -> str:
    """docs/config.md."""
    lines = []
    for title, keys in key_groups():
        lines += ["", f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {kind} | {default} | {sentence} |" for name, kind, default, sentence in keys]
    return _CONFIG_PAGE + "\n".join([*lines, ""])


def errors_page() -> str:
    """docs/errors.md."""
    found = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.BurnishError)]
    rows = [f"| `{kind.__name__}` | `{kind.mro()[1].__name__}` | {_sentence(kind)} |" for kind in found]
    return _ERRORS_PAGE.format(classes="\n".join(rows))


def write_pages(folder: Path) -> None:
    """Write both pages into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.md").write_text(config_page(), encoding="utf-8")
    (folder / "errors.md").write_text(errors_page(), encoding="utf-8")


def _kind(kind: Any, limits: Sequence[Any] = ()) -> str:
    """A type in words, with the limits of a number."""
    shape, parts = get_origin(kind), get_args(kind)
    if kind in _WORDS:
        bounds = [f"{SIGNS[name]} {bound:g}" for limit in limits for name, bound in asdict(limit).items()]
        return f"{_WORDS[kind]} {' and '.join(bounds)}".strip()
    if shape is Annotated:
        return _kind(parts[0], [item for field in parts[1:] for item in field.metadata])
    if shape in (UnionType, Union):
        return f"{_kind(parts[0], limits)} or {_kind(parts[1])}"
    if shape is tuple:
        return f"list of {_kind(parts[0]).replace('number', 'numbers')}"
    if shape is Mapping:
        return f"{{{_kind(parts[0])}: {_kind(parts[1])}}}"
    return ", ".join(parts if shape is Literal else kind)


def _default(field: FieldInfo) -> str:
    """A default, as it is written on the command line."""
    value = field.default
    if field.is_required() or value is None:
        return "required" if field.is_required() else "none"
    if isinstance(value, str):
        return str(value) or "empty"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _sentence(kind: type) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


if __name__ == "__main__":
    write_pages(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
