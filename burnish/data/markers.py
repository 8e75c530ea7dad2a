"""Spans by a template's own generation markers, for templates whose loops do not tell turns apart.

The rule: markers are believed for a conversation only where words put into its texts prove them, and what they take
in of the header and after the closing token is cut off.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.data.chat import Message
from burnish.data.frames import REPLIES, USER, Prepare, UnprovenError, common_prefix, common_suffix, user
from burnish.data.template import TEMPLATE_FAULTS, MarkedTemplate, Span

BY_MARKERS = "turns are found by the chat template's generation markers, since its loops do not tell them apart"
_PLACES: Sequence[Sequence[Message]] = ([], [user(2)], [user(2), REPLIES[0]])
"""What may follow a reply."""


@dataclass(frozen=True, slots=True)
class _Edges:
    """What markers take in besides an assistant's own text, or leave out of it."""

    header: str
    """Header at their start."""
    blanks: str
    """What follows the closing token at their end."""
    terminator: str
    """The closing token, where it follows them; else it is inside."""


class MarkerReader:
    """Reads the markers of one template."""

    def __init__(
        self, template: MarkedTemplate, *, variables: Mapping[str, Any], prepare: Prepare, special: re.Pattern[str]
    ) -> None:
        self._template = template
        self._variables = variables
        self._prepare = prepare
        self._special = special
        self._edges: _Edges | None = None

    def find(self, messages: Sequence[Message], worded: Sequence[Message], tools: Any) -> tuple[str, dict[int, Span]]:
        """The text of ``messages``, and the span of each assistant turn, terminator included.

        Args:
            messages: the conversation.
            worded: the same with a word of its own in every text.
            tools: schemas, or ``None``.

        Raises:
            UnprovenError: the markers are not one a turn, or do not hold what they should.
        """
        edges = self._edges = self._edges or self._learn()
        text, spans = self._render(messages, tools)
        worded_text, worded_spans = self._render(worded, tools)
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not len(spans) == len(worded_spans) == len(replies):
            raise UnprovenError(f"{len(spans)} generation markers for {len(replies)} assistant turns")
        for word in re.finditer(r"(?i)qz(\d{6})([cr])zq", worded_text):
            owner = next(
                (reply for reply, (a, b) in zip(replies, worded_spans, strict=True) if a <= word.start() < b), None
            )
            if owner != int(word[1]) and (owner is not None or int(word[1]) in replies):
                raise UnprovenError(f"message {int(word[1])}: its text is not where its generation marker is")
        return text, {reply: self._cut(text, span, edges) for reply, span in zip(replies, spans, strict=True)}

    def _render(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
        try:
            return self._template.render_markers(self._prepare(messages), tools=tools, **self._variables)
        except TEMPLATE_FAULTS as error:
            raise UnprovenError(f"the template cannot render this ({type(error).__name__}: {error})") from error

    def _cut(self, text: str, span: Span, edges: _Edges) -> Span:
        start, stop = span
        inside, after = text[start:stop], text[stop:]
        begin, end = start + len(edges.header), stop - len(edges.blanks) + len(edges.terminator)
        fits = inside.startswith(edges.header) and inside.endswith(edges.blanks) and after.startswith(edges.terminator)
        closing = list(self._special.finditer(text, begin, max(begin, end)))
        if not fits or not closing or closing[-1].end() != end:
            raise UnprovenError("a generation marker does not begin and end as in other conversations")
        if not text[begin : closing[-1].start()].strip():
            raise UnprovenError("a generation marker holds nothing")
        return begin, end

    def _learn(self) -> _Edges:
        try:
            found = {self._edges_before(after) for after in _PLACES}
        except TEMPLATE_FAULTS as error:
            raise UnprovenError(f"the template writes no generation prompt ({error})") from error
        if len(found) != 1:
            raise UnprovenError("generation markers begin or end in different ways")
        return found.pop()

    def _edges_before(self, after: Sequence[Message]) -> _Edges:
        texts = []
        for reply in REPLIES:
            text, spans = self._render([USER, reply, *after], None)
            if not spans or reply["content"] not in text[slice(*spans[0])]:
                raise UnprovenError("generation markers do not hold the assistant's text")
            texts.append((text[: spans[0][0]], text[slice(*spans[0])], text[spans[0][1] :]))
        plain, asked = (
            self._template.render_plain(self._prepare([USER]), prompt=prompt, tools=None, **self._variables)
            for prompt in (False, True)
        )
        before, inside = texts[0][0], common_prefix(text for _, text, _ in texts)
        # The generation prompt ends where the assistant begins, wherever the markers do.
        if plain == asked or not asked.startswith(before) or not inside.startswith(asked[len(before) :]):
            raise UnprovenError("generation markers do not begin where the generation prompt ends")
        tail, following = common_suffix(text for _, text, _ in texts), texts[0][2]
        closing = list(self._special.finditer(tail))
        if closing:
            return _Edges(asked[len(before) :], tail[closing[-1].end() :], "")
        first = self._special.match(following)
        if tail.strip() or first is None:
            raise UnprovenError("no special token closes what the generation markers hold")
        return _Edges(asked[len(before) :], "", first.group())
