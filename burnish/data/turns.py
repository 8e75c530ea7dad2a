"""A conversation becomes its text and, in it, what each assistant turn says itself, closing token included.

The rule: each span is checked on the conversation itself, and what cannot be proven is refused.
"""

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from burnish.data.chat import REASONING_KEYS, Conversation, Message, text_of
from burnish.data.frames import (
    CALL,
    REPLIES,
    RESULT,
    TOOL,
    USER,
    Frame,
    LeftOutError,
    Probe,
    UnprovenError,
    learn_frame,
    only_block,
)
from burnish.data.markers import BY_MARKERS, MarkerReader
from burnish.data.template import TEMPLATE_FAULTS, MarkedTemplate, Rendered, Span

LEFT_OUT = "the chat template leaves out the text of some"
MAX_SHAPES = 4096
"""Shapes of conversations remembered at a time."""


class Found(NamedTuple):
    """A conversation as text, and where in it are the targets."""

    text: str
    spans: list[Span]
    is_new: bool
    """Whether no conversation of this shape was found before."""


class TurnFinder:
    """Finds the own text of assistant turns under one template."""

    def __init__(
        self, template: MarkedTemplate, *, variables: Mapping[str, Any], special_tokens: Sequence[str]
    ) -> None:
        """Find turns under ``template``.

        Args:
            template: the chat template.
            variables: what it is given besides messages and tools.
            special_tokens: texts that the tokenizer never splits.
        """
        self._template = template
        self._variables = dict(variables)
        self._special = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or r"(?!)")
        self._frames: dict[bool, Frame | UnprovenError] = {}
        self._shapes: dict[Hashable, str] = {}
        self._notices: set[str] = set()
        self._form = self._choose_form()
        self._markers = MarkerReader(template, variables=self._variables, prepare=self.prepare, special=self._special)

    def find(self, conversation: Conversation, *, turns: Sequence[int]) -> Found:
        """The text of ``conversation`` and the span of each of its messages ``turns``, terminator included.

        Raises:
            UnprovenError: a span cannot be proven, or the template cannot render this.
        """
        messages, tools = conversation.messages, list(conversation.tools) or None
        try:
            frame = self.frame(with_tools=tools is not None)
            rendered = self._render(messages, tools)
            is_new = self._check_shape(messages, tools, turns)
            spans = [self._span(frame, rendered, messages, turn) for turn in turns]
            return Found(rendered.text, spans, is_new)
        except UnprovenError as reason:
            if isinstance(reason, LeftOutError) or not self._template.has_markers:
                raise
            return self._find_by_markers(messages, tools, turns, reason)

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template gets them: copies, since blocks are told apart by the identity of messages."""
        return [self._form.of(message) for message in messages]

    def frame(self, *, with_tools: bool) -> Frame:
        """What the template writes around an assistant's text; learnt once.

        Raises:
            UnprovenError: no frame can be learnt from this template.
        """
        if with_tools not in self._frames:
            try:
                self._frames[with_tools] = learn_frame(self._probe(with_tools), self._special)
            except UnprovenError as reason:
                self._frames[with_tools] = reason
        frame = self._frames[with_tools]
        if isinstance(frame, UnprovenError):
            raise frame
        return frame

    @property
    def notices(self) -> set[str]:
        """What a user should know of the frames learnt so far."""
        frames = [frame for frame in self._frames.values() if isinstance(frame, Frame)]
        found = self._notices | {
            "the chat template closes no assistant turn; the end is not learnt" for f in frames if not f.terminators
        }
        for terminator in {terminator for frame in frames for terminator, _ in frame.terminators}:
            if not self._special.search(terminator):
                found.add(f"the chat template closes a turn with {terminator!r}, which is no token of this tokenizer")
        return found

    def _render(self, messages: Sequence[Message], tools: Any) -> Rendered:
        try:
            return self._template.render(self.prepare(messages), tools=tools, **self._variables)
        except TEMPLATE_FAULTS as error:
            raise UnprovenError(f"the template cannot render this ({type(error).__name__}: {error})") from error

    def _span(self, frame: Frame, rendered: Rendered, messages: Sequence[Message], turn: int) -> Span:
        start, stop = only_block(rendered, turn)
        after_tool = turn > 0 and messages[turn - 1]["role"] == "tool"
        try:
            header, end, close = frame.split(rendered.text[start:stop], first=turn == 0, after_tool=after_tool)
        except UnprovenError as reason:
            raise UnprovenError(f"message {turn}: {reason}") from reason
        if not rendered.text[start + header : start + end].strip():
            raise LeftOutError(f"message {turn}: the template leaves its content out")
        if messages[turn].get("tool_calls") and not frame.writes_calls:
            raise LeftOutError(f"message {turn}: the template leaves its tool calls out")
        return start + header, start + close

    def _find_by_markers(
        self, messages: Sequence[Message], tools: Any, turns: Sequence[int], reason: UnprovenError
    ) -> Found:
        try:
            text, spans = self._markers.find(messages, _with_words(messages), tools)
        except UnprovenError as other:
            raise UnprovenError(f"{reason}; {other}") from other
        self._notices.add(BY_MARKERS)
        return Found(text, [spans[turn] for turn in turns], True)

    def _check_shape(self, messages: Sequence[Message], tools: Any, turns: Sequence[int]) -> bool:
        """Where the texts of messages come out, tried once for all conversations of this shape; whether this was it.

        A shape is all that a template can tell conversations apart by: roles, which keys there are, which texts are
        blank, and which of the words that the template looks for are in them.
        """
        shape = (*(self._shape(message) for message in messages), bool(tools), *turns)
        is_new = shape not in self._shapes
        if is_new:
            worded = self._render(_with_words(messages), tools)
            self._notices |= {f"{LEFT_OUT} {messages[i]['role']} turns" for i in _left_out(worded, messages)}
            if len(self._shapes) == MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = _misplaced_word(worded, turns)
        if fault := self._shapes[shape]:
            raise UnprovenError(fault)
        return is_new

    def _shape(self, message: Message) -> Hashable:
        return tuple((key, self._look(value) if key != "role" else value) for key, value in message.items())

    def _look(self, value: Any) -> Hashable:
        if isinstance(value, str):
            return (not value or value.isspace(), *(word in value for word in self._template.sought))
        if isinstance(value, list) and value and "type" in value[0]:
            return tuple((part["type"], self._look(part.get("text"))) for part in value)
        return len(value) if isinstance(value, (list, dict)) else value

    def _probe(self, with_tools: bool) -> Probe:
        variables = {**self._variables, "tools": [TOOL] if with_tools else None}
        return Probe(self._template, variables=variables, prepare=self.prepare)

    def _choose_form(self) -> "_Form":
        """How the template wants texts, missing ones and the arguments of tool calls, tried out."""
        text = REPLIES[0]["content"]
        as_parts = not self._writes(text, _Form(), REPLIES[0]) and bool(self._writes(text, _Form(True), REPLIES[0]))
        silent = {key: value for key, value in CALL.items() if key != "content"}
        forms = [_Form(as_parts, filled, as_text) for filled in (False, True) for as_text in (False, True)]
        return next((form for form in forms if self._writes("{'k'", form, silent, RESULT) is False), forms[0])

    def _writes(self, text: str, form: "_Form", *turns: Message) -> bool | None:
        """Whether ``text`` comes out of a conversation; ``None`` where the template raises."""
        try:
            messages = [form.of(message) for message in (USER, *turns)]
            return text.lower() in self._template.render(messages, tools=None, **self._variables).text.lower()
        except TEMPLATE_FAULTS:
            return None


@dataclass(frozen=True, slots=True)
class _Form:
    """How messages are given to a template."""

    content_as_parts: bool = False
    no_content_as_empty: bool = False
    arguments_as_text: bool = False

    def of(self, message: Message) -> Message:
        """A new dict."""
        message = {"role": message["role"], "content": "", **message} if self.no_content_as_empty else dict(message)
        if self.content_as_parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        if self.arguments_as_text and "tool_calls" in message:
            message["tool_calls"] = [_call_as_text(call) for call in message["tool_calls"]]
        return message


def _call_as_text(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _call_as_text(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def _with_words(messages: Sequence[Message]) -> list[Message]:
    """With a word in the middle of each content (c) and of its reasoning (r), wherever there is any."""
    return [_worded(message, f"qz{number:06d}") for number, message in enumerate(messages)]


def _worded(message: Message, number: str) -> Message:
    worded = dict(message)
    for key in ("content", *REASONING_KEYS):
        word = f"{number}{'c' if key == 'content' else 'r'}zq"
        if isinstance(message.get(key), list):
            worded[key] = [_with_word(part, "text", word) for part in message[key]]
        else:
            worded = _with_word(worded, key, word)
    return worded


def _with_word(holder: Mapping[str, Any], key: str, word: str) -> dict[str, Any]:
    text = holder.get(key)
    if not isinstance(text, str) or not text.strip():
        return dict(holder)
    return {**holder, key: text[: len(text) // 2] + word + text[len(text) // 2 :]}


def _left_out(rendered: Rendered, messages: Sequence[Message]) -> list[int]:
    """Messages to the assistant whose content does not come out of ``_with_words``."""
    written = {int(number) for number in re.findall(r"(?i)qz(\d{6})czq", rendered.text)}
    asked = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
    return [i for i in asked if i not in written and text_of(messages[i].get("content", "")).strip()]


def _misplaced_word(rendered: Rendered, turns: Sequence[int]) -> str:
    """What is wrong with where the words of ``_with_words`` stand; empty when each is where it belongs."""
    try:
        blocks = {turn: only_block(rendered, turn) for turn in turns}
    except UnprovenError as fault:
        return str(fault)
    for found in re.finditer(r"(?i)qz(\d{6})([cr])zq", rendered.text):
        owner = int(found[1])
        for turn, (start, stop) in blocks.items():
            inside = start <= found.start() < stop
            if inside and owner != turn:
                return f"message {turn}: the template writes text of message {owner} into this turn"
            if not inside and owner == turn and found[2] in "cC":
                return f"message {turn}: the template writes its text outside its own turn too"
    return ""
