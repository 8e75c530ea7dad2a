"""A chat template that tells which part of its output it wrote while it handled which message.

The rule: the text cannot change. Marks are empty strings put into the compiled template; only their places count.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext
from jinja2.visitor import NodeTransformer

TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template may raise on a conversation it cannot render."""

Span: TypeAlias = tuple[int, int]
"""Characters from the first up to, but not including, the second."""

_TURN, _LOOP = "burnish_turn_mark", "burnish_loop_mark"
_NO_MESSAGE = -1


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the template writes it."""

    text: str
    blocks: dict[int, list[Span]]
    """For each message, where the template wrote while it handled it; empty places are left out."""


class MarkedTemplate:
    """A chat template whose loops over messages leave marks."""

    def __init__(self, plain: jinja2.Template, *, source: str) -> None:
        """Compile ``source`` once more, with marks, in the environment of ``plain``."""
        self._plain = plain
        self._numbers: dict[int, int] = {}
        self.has_markers = re.search(r"{%[-+]?\s*generation\s*[-+]?%}", source) is not None
        self.sought = _sought(plain.environment.parse(source))
        """Words that the template looks for in texts."""
        environment = plain.environment.overlay()
        # As filters, since the sandbox looks into each call of a function.
        environment.filters = {**environment.filters, _TURN: self._turn_mark, _LOOP: _loop_mark}
        environment.concat = _concat  # type: ignore[method-assign]
        environment.getattr = _quick_getattr(environment)  # type: ignore[method-assign, assignment]
        tree = _InsertMarks().visit(environment.parse(source))
        for node in tree.find_all(nodes.Node):
            node.environment = environment
        tree.set_lineno(1, override=False)
        self._marked = jinja2.Template.from_code(environment, environment.compile(tree), environment.globals)

    def render_plain(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool, **variables: Any) -> str:
        """The text without marks, with the generation prompt or without."""
        return self._plain.render(messages=messages, add_generation_prompt=prompt, documents=None, **variables)

    def render_markers(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> tuple[str, list[Span]]:
        """The text, and what ``generation`` blocks wrote of it, as the template's environment tracks them."""
        parts: list[str] = []
        spans: list[Span] = []
        with self._plain.environment.activate_tracker(parts, spans):  # type: ignore[attr-defined]
            parts.extend(
                self._plain.generate(messages=messages, add_generation_prompt=False, documents=None, **variables)
            )
        return "".join(parts), spans

    def render(self, messages: Sequence[dict[str, Any]], **variables: Any) -> Rendered:
        """The text, and what was written for which message.

        Raises:
            One of ``TEMPLATE_FAULTS``: the template cannot render this.
        """
        self._numbers = {id(message): i for i, message in enumerate(messages)}
        context = self._marked.new_context(
            {"messages": messages, "add_generation_prompt": False, "documents": None, **variables}
        )
        output = _concat(self._marked.root_render_func(context))
        return Rendered("".join([output]), _blocks(output.marks if isinstance(output, _Piece) else []))

    def _turn_mark(self, loop: int, *values: Any) -> "_Mark":
        for value in values:
            if type(value) is dict and id(value) in self._numbers:
                return _Mark(loop, self._numbers[id(value)])
        return _Mark(loop, _NO_MESSAGE)


_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))


def _quick_getattr(environment: jinja2.Environment) -> Callable[[Any, str], Any]:
    """What the sandbox gives for ``object.name``, without its detour for keys of messages and for ``loop``."""
    slow = environment.getattr

    def read(value: Any, name: str) -> Any:
        if type(value) is dict and name not in _OF_DICTS:
            return value[name] if name in value else environment.undefined(obj=value, name=name)
        if type(value) is LoopContext and name in _OF_LOOPS:
            return getattr(value, name)
        return slow(value, name)

    return read


class _Mark(str):
    """An empty string that says: from here on, ``loop`` handles ``message``."""

    __slots__ = ("loop", "message")
    loop: int
    message: int

    def __new__(cls, loop: int, message: int) -> "_Mark":
        mark = super().__new__(cls, "")
        mark.loop, mark.message = loop, message
        return mark

    def __str__(self) -> str:
        return self  # Jinja calls str() on all it writes, which would lose the mark.


class _Piece(str):
    """What a macro or a block wrote, with the marks inside it and their places."""

    __slots__ = ("marks",)
    marks: list[tuple[int, _Mark]]

    def __str__(self) -> str:
        return self


@jinja2.pass_context  # or it would be worked out once, on compiling
def _loop_mark(_: Context, loop: int) -> _Mark:
    return _Mark(loop, _NO_MESSAGE)


def _concat(parts: Iterable[str]) -> str:
    """Join what a template yields, and keep the marks."""
    texts, marks, length = [], [], 0
    for part in parts:
        if isinstance(part, _Mark):
            marks.append((length, part))
            continue
        if isinstance(part, _Piece):
            marks.extend((length + place, mark) for place, mark in part.marks)
        texts.append(part)
        length += len(part)
    text = "".join(texts)
    if not marks:
        return text
    piece = _Piece(text)
    piece.marks = marks
    return piece


def _blocks(marks: Iterable[tuple[int, _Mark]]) -> dict[int, list[Span]]:
    """From one mark of a loop to its next is the block of the message that the first mark names."""
    blocks: dict[int, list[Span]] = {}
    handled: dict[int, tuple[int, int]] = {}
    for place, mark in marks:
        message, start = handled.pop(mark.loop, (_NO_MESSAGE, place))
        if place > start:
            blocks.setdefault(message, []).append((start, place))
        if mark.message != _NO_MESSAGE:
            handled[mark.loop] = (mark.message, place)
    return blocks


def _sought(tree: nodes.Template) -> tuple[str, ...]:
    """Arguments of methods such as ``split``, and what stands before ``in`` or has a name, unless it may be a key."""
    calls = [node for node in tree.find_all(nodes.Call) if isinstance(node.node, nodes.Getattr)]
    sought = _texts(arg for call in calls for arg in call.args)
    others = [node.expr for node in tree.find_all(nodes.Compare)] + [node.node for node in tree.find_all(nodes.Assign)]
    return tuple(sorted(word for word in sought | _texts(others) if not word.isidentifier()))


def _texts(found: Iterable[nodes.Node]) -> set[str]:
    """The texts that are written out; blanks alone are none."""
    values = {node.value for node in found if isinstance(node, nodes.Const)}
    return {value for value in values if isinstance(value, str) and value.strip()}


class _InsertMarks(NodeTransformer):
    """Puts a mark at the start of every loop's body, after ``set message = messages[i]`` in it, and after every loop."""

    def __init__(self) -> None:
        self._loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:  # noqa: N802 - the name Jinja calls
        self.generic_visit(node)
        loop, self._loops = self._loops, self._loops + 1
        names = [name.name for name in [node.target, *node.target.find_all(nodes.Name)] if isinstance(name, nodes.Name)]
        body: list[nodes.Node] = [_write(_TURN, loop, names)]
        for child in node.body:
            body.append(child)
            if isinstance(child, nodes.Assign) and isinstance(child.target, nodes.Name) and _picks(child.node, names):
                body.append(_write(_TURN, loop, [child.target.name]))
        node.body = body
        return [node, _write(_LOOP, loop, [])]


def _picks(node: nodes.Node, names: Sequence[str]) -> bool:
    """Whether ``node`` is ``something[name]`` with one of the loop's own names."""
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Name) and node.arg.name in names


def _write(function: str, loop: int, names: Sequence[str]) -> nodes.Output:
    arguments: list[nodes.Expr] = [nodes.Name(name, "load") for name in names]
    return nodes.Output([nodes.Filter(nodes.Const(loop), function, arguments, [], None, None)])
