"""What a chat template writes around an assistant's own text, learnt from made-up conversations.

A turn's block, what the template writes while it handles the message, is header + own text + terminator + blanks.
The rule: a block that does not fit what was learnt is refused, never guessed at.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, takewhile
from typing import Any, TypeAlias

from burnish.data.chat import Message
from burnish.data.template import TEMPLATE_FAULTS, MarkedTemplate, Rendered, Span

BLANKS = " \t\r\n"

Prepare: TypeAlias = Callable[[Sequence[Message]], list[Message]]


class UnprovenError(Exception):
    """Which text is the assistant's own cannot be proven; says why."""


class LeftOutError(UnprovenError):
    """The template writes nothing of what the turn says."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What a template writes around an assistant's own text."""

    header: str
    prompts: tuple[str, ...]
    """What it writes to ask for an assistant turn; where a block starts with one, that is its header."""
    first_headers: tuple[str, ...]
    """Headers of a turn that opens the conversation; empty when they are not clear."""
    tool_headers: tuple[str, ...]
    """Further headers of a turn after a tool's result."""
    terminators: tuple[tuple[str, str], ...]
    """What closes a turn, and what follows it in the block; longest first. Empty when nothing closes it."""
    tail: str
    """Blanks at the end of every block that nothing closes."""
    writes_calls: bool
    """Whether tool calls come out at all."""

    def split(self, block: str, *, first: bool, after_tool: bool) -> tuple[int, int, int]:
        """Where in ``block`` the own text starts, where it ends, and where the terminator ends.

        Raises:
            UnprovenError: the block does not begin or end as learnt.
        """
        start = self._header_length(block, first, after_tool)
        if not self.terminators:
            end = len(block) - (len(self.tail) if block.endswith(self.tail) else 0)
            return start, max(start, end), max(start, end)
        for terminator, rest in self.terminators:
            if block.endswith(terminator + rest):
                stop = len(block) - len(rest)
                if stop - len(terminator) < start:
                    raise UnprovenError("header and terminator overlap")
                return start, stop - len(terminator), stop
        raise UnprovenError("the turn does not end with a known terminator")

    def _header_length(self, block: str, first: bool, after_tool: bool) -> int:
        if first:
            candidates = self.first_headers
        else:
            known = (self.header,) if self.header or not self.prompts else ()
            candidates = known + self.prompts + (self.tool_headers if after_tool else ())
        fitting = [len(header) for header in candidates if block.startswith(header)]
        if not fitting:
            raise UnprovenError("the turn does not begin with the assistant's header")
        return max(fitting)


def user(number: int) -> Message:
    return {"role": "user", "content": f"Uq{number}zu"}


def _assistant(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


_CALLS = [{"type": "function", "id": "call00001", "function": {"name": "fn", "arguments": {"k": "v"}}}]
_PARAMETERS = {"type": "object", "properties": {"k": {"type": "string", "description": "K"}}, "required": ["k"]}
TOOL = {"type": "function", "function": {"name": "fn", "description": "F", "parameters": _PARAMETERS}}
USER = user(1)
CALL = _assistant("", tool_calls=_CALLS)
RESULT: Message = {"role": "tool", "content": "Rq0zr", "name": "fn", "tool_call_id": "call00001"}
_SYSTEM: Message = {"role": "system", "content": "Sq0zs"}
_EARLIER = _assistant("Pq9zp")
# First and last letters all differ, so that no letter of a content can be taken for header or terminator.
REPLIES = (_assistant("Xq1zx"), _assistant("7Yq1zy"), _assistant("Ωq1zw"))
_RICH_REPLIES = (
    CALL,
    _assistant("Xq1zx", tool_calls=_CALLS),
    _assistant("Xq1zx", thinking="Tq1zt", reasoning_content="Tq1zt"),
)

_Place: TypeAlias = tuple[list[Message], list[Message]]
"""Where a reply stands: the messages before it and those after it."""
_AFTER_USER: Sequence[_Place] = (
    ([USER], []),
    ([_SYSTEM, USER], []),
    ([USER, _EARLIER, user(2)], []),
    ([USER], [user(2), _EARLIER]),
    ([USER], [user(2)]),
)
_AFTER_TOOL: Sequence[_Place] = (
    ([USER, CALL, RESULT], []),
    ([USER, CALL, RESULT], [user(2), _EARLIER]),
    ([USER, {**CALL, "content": "Pq9zp"}, RESULT], []),
)
_FIRST: Sequence[_Place] = (([], []), ([], [user(2)]), ([], [user(2), _EARLIER]))


class Probe:
    """Renders made-up conversations and cuts out the block of one reply."""

    def __init__(self, template: MarkedTemplate, *, variables: Mapping[str, Any], prepare: Prepare) -> None:
        self._template = template
        self._variables = variables
        self._prepare = prepare

    def block(self, before: Sequence[Message], reply: Message, after: Sequence[Message]) -> str | None:
        """The block of ``reply``; ``None`` where the template refuses this conversation or writes nothing.

        Raises:
            UnprovenError: the template does not keep the texts of messages apart.
        """
        messages = [*before, reply, *after]
        try:
            rendered = self._template.render(self._prepare(messages), **self._variables)
            plain = self._template.render_plain(self._prepare(messages), prompt=False, **self._variables)
        except TEMPLATE_FAULTS:
            return None
        if rendered.text != plain:
            raise UnprovenError("the template writes something else when its loops are marked")
        own = reply["content"].lower()
        if len(before) not in rendered.blocks:
            if own and own in rendered.text.lower():
                raise UnprovenError("the template writes assistant text outside any loop over the messages")
            return None
        start, stop = only_block(rendered, len(before))
        block = rendered.text[start:stop].lower()
        others = [message["content"].lower() for message in (*before, *after) if message["content"]]
        if any(other in block for other in others):
            raise UnprovenError("the template writes another message's text into the assistant's turn")
        if own and own in (rendered.text[:start] + "\0" + rendered.text[stop:]).lower():
            raise UnprovenError("the template writes assistant text outside its own turn too")
        return rendered.text[start:stop]

    def blocks(self, before: Sequence[Message], replies: Iterable[Message], after: Sequence[Message]) -> list[str]:
        found = (self.block(before, reply, after) for reply in replies)
        return [block for block in found if block]

    def prompt(self, before: Sequence[Message]) -> str:
        """What the template adds to ask for an assistant turn; empty when it adds nothing."""
        try:
            without = self._template.render_plain(self._prepare(before), prompt=False, **self._variables)
            with_it = self._template.render_plain(self._prepare(before), prompt=True, **self._variables)
        except TEMPLATE_FAULTS:
            return ""
        return with_it[len(common_prefix([without, with_it])) :]


def learn_frame(probe: Probe, special: re.Pattern[str]) -> Frame:
    """What the template of ``probe`` writes around an assistant's text.

    Args:
        probe: renders made-up conversations.
        special: matches texts that the tokenizer never splits.

    Raises:
        UnprovenError: turns have no common form, or text follows the terminator.
    """
    after_user = [probe.blocks(before, REPLIES, after) for before, after in _AFTER_USER]
    after_tool = [probe.blocks(before, REPLIES, after) for before, after in _AFTER_TOOL]
    first = _first_blocks(probe)
    plain = [blocks for blocks in after_user if len(blocks) > 1] or [blocks for blocks in first if len(blocks) > 1]
    if not plain:
        raise UnprovenError("the template writes no assistant turn in any conversation that was tried")
    rich = [probe.blocks(before, _RICH_REPLIES, after) for before, after in _AFTER_USER]
    prompts = tuple(
        sorted({probe.prompt(before) for before, after in (*_AFTER_USER, *_AFTER_TOOL) if not after} - {""})
    )
    header = _header([block for blocks in (*plain, *rich) for block in blocks], prompts)
    tool_blocks = [blocks for blocks in after_tool if len(blocks) > 1]
    tails = [common_suffix(blocks) for blocks in (*plain, *tool_blocks)]
    calls = [block for blocks in rich for block in blocks if "fn" in block]
    terminators = _terminators(tails, calls, special)
    return Frame(
        header=header,
        prompts=tuple(prompt for prompt in prompts if prompt.startswith(header) and prompt != header),
        first_headers=_first_headers(first, header, prompts),
        tool_headers=_tool_headers(tool_blocks, header, prompts),
        terminators=terminators,
        tail=common_suffix(tails) if not terminators else "",
        writes_calls=bool(calls),
    )


def _first_blocks(probe: Probe) -> list[list[str]]:
    """Blocks of turns that open a conversation; none where the template takes its first message apart."""
    try:
        return [probe.blocks(before, REPLIES, after) for before, after in _FIRST]
    except UnprovenError:
        return []


def _header(blocks: Sequence[str], prompts: Sequence[str]) -> str:
    """What all turns begin with, cut to the generation prompt: the rest the model writes."""
    header = common_prefix(blocks)
    for prompt in prompts:
        if header.startswith(prompt):
            header = prompt
    return header if prompts or header.strip(BLANKS) else ""


def _first_headers(first: Sequence[Sequence[str]], header: str, prompts: Sequence[str]) -> tuple[str, ...]:
    """Headers of a turn that opens the conversation: a preamble may stand before the usual header, and only there."""
    if not any(first):
        return ()
    constant = common_prefix([block for blocks in first for block in blocks])
    if constant.startswith(header) and (header or not constant.strip(BLANKS)):
        return (header, *(prompt for prompt in prompts if prompt.startswith(header) and prompt != header))
    return (constant,) if header and constant.endswith(header) else ()


def _tool_headers(groups: Sequence[Sequence[str]], header: str, prompts: Sequence[str]) -> tuple[str, ...]:
    constants = {common_prefix(blocks) for blocks in groups}
    other = {constant for constant in constants if constant and not (header and constant.startswith(header))}
    return tuple(sorted(constant for constant in other if prompts or constant.strip(BLANKS)))


def _terminators(tails: Sequence[str], calls: Sequence[str], special: re.Pattern[str]) -> tuple[tuple[str, str], ...]:
    """What closes a turn, with what follows it, from the common ends of turns and from turns with tool calls."""
    closed = {tail for tail in tails if tail.strip(BLANKS)}
    if not closed:
        return ()
    if len(closed) < len(set(tails)):
        raise UnprovenError("the template closes some assistant turns and leaves others open")
    found = {_split_tail(tail, special) for tail in closed}
    for block in calls:
        if not any(block.endswith(terminator + rest) for terminator, rest in found):
            terminator, rest = _split_tail(block, special, last_only=True)
            found |= {(terminator, rest)} if terminator and not rest.strip(BLANKS) else set()
    if any(rest.strip(BLANKS) for _, rest in found):
        raise UnprovenError("the template writes text after the terminator of an assistant turn")
    for (short, short_rest), (long, long_rest) in permutations(tuple(found), 2):
        # "<end>\n" inside the conversation and "<end>\n<eos>" at its end: the first one closes the turn.
        if long != short and long.startswith(short + short_rest):
            found.discard((long, long_rest))
            found.add((short, long[len(short) :] + long_rest))
    return tuple(sorted(found, key=lambda pair: (-len(pair[0] + pair[1]), pair)))


def _split_tail(tail: str, special: re.Pattern[str], *, last_only: bool = False) -> tuple[str, str]:
    """``tail`` up to its last special token, or up to its last letter when it has none, and the rest."""
    tokens = list(special.finditer(tail))
    if last_only:
        return (tokens[-1].group(), tail[tokens[-1].end() :]) if tokens else ("", tail)
    end = tokens[-1].end() if tokens else len(tail.rstrip(BLANKS))
    return tail[:end], tail[end:]


def common_prefix(texts: Iterable[str]) -> str:
    """What all ``texts`` begin with; empty for no text."""
    ordered = sorted(texts)
    pairs = zip(ordered[0], ordered[-1], strict=False) if ordered else ()
    return ordered[0][: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))] if ordered else ""


def common_suffix(texts: Iterable[str]) -> str:
    return common_prefix(text[::-1] for text in texts)[::-1]


def only_block(rendered: Rendered, turn: int) -> Span:
    blocks = rendered.blocks.get(turn, [])
    if len(blocks) != 1:
        problem = "is written in more than one place" if blocks else "is not written in a loop over the messages"
        raise UnprovenError(f"message {turn}: the turn {problem}")
    return blocks[0]
