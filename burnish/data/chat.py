"""A raw row becomes a conversation, or a reason why it cannot be used.

The rule: what is absent stays absent. Nulls and NaN are never turned into text.
"""

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from burnish.data.pictures import image_of
from burnish.data.rows import RawRows
from burnish.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names a message's reasoning goes by; templates read the first, some the second."""
SPEAKERS = {
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"},
    **{"observation": "tool", "function_response": "tool", "function_call": "assistant"},
}
"""Roles by the names that ShareGPT rows have for them; other names are roles themselves."""
SHAREGPT_NOTICE = "messages of from/value (ShareGPT) are read as role/content"
ALPACA_KEYS, COMPLETION_KEYS, SHAREGPT_KEY = ("instruction", "output"), ("prompt", "completion"), "conversations"
TRAIN_KEYS = ("train", "weight")
"""Names of the flag that keeps an assistant turn from being a target; no chat template sees them."""
DEFAULT_MESSAGES_KEY, DEFAULT_TOOLS_KEY, DEFAULT_SYSTEM_KEY = "messages", "tools", "system"

Message: TypeAlias = dict[str, Any]


class Kind(StrEnum):
    """How the rows of a dataset hold a conversation."""

    CHAT = "chat"
    """A list of messages."""
    ALPACA = "alpaca"
    """``instruction``, ``input``, ``output``."""
    COMPLETION = "completion"
    """``prompt`` and ``completion``, each text or a list of messages."""


class DropReason(StrEnum):
    """Why a row cannot be used."""

    NO_TARGET = "no_target"
    """No token of the trained turns is left, the only one stands at position 0, or no turn is to be trained."""
    NO_ASSISTANT = "no_assistant"
    EMPTY_PROMPT = "empty_prompt"
    EMPTY_REPLY = "empty_reply"
    """The last assistant turn says nothing."""
    TOO_LONG = "too_long"
    IMAGE_TOO_LONG = "image_too_long"
    """An image row longer than ``max_length``; images are never cut."""
    UNPROVEN_SPAN = "unproven_span"
    """Which tokens are the assistant's own could not be proven."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is not used."""

    reason: DropReason
    detail: str
    """What was found in this row."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row, ready for a chat template."""

    messages: tuple[Message, ...]
    """No value is null; tool call arguments are objects; content is text or absent, or a list of parts with images."""
    tools: tuple[dict[str, Any], ...]
    """Schemas of the tools; empty for none."""
    kind: Kind
    trainable: tuple[int, ...]
    """Which messages may be targets: assistant turns, but for those whose ``train`` is false."""
    images: tuple[Any, ...] = ()
    """In the order of the parts ``{type: image}`` of the messages."""


@dataclass(frozen=True, slots=True)
class ChatReader:
    """Reads the rows of one dataset."""

    kind: Kind
    messages_key: str
    tools_key: str
    system_key: str
    nulls_are_padding: bool
    notices: tuple[str, ...] = ()
    """What a user should know of how these rows are read."""

    def read(self, row: dict[str, Any]) -> Conversation | Dropped:
        """The conversation of ``row``.

        Raises:
            DataError: the row has another form than rows of this kind have; says where in the row.
        """
        if self.nulls_are_padding:
            row = _without_nulls(row)
        found = {Kind.CHAT: self._chat, Kind.ALPACA: self._alpaca, Kind.COMPLETION: self._completion}[self.kind](row)
        if isinstance(found, Dropped):
            return found
        system = row.get(self.system_key)
        if not is_blank(system) and found[0]["role"] not in ("system", "developer"):
            found = [{"role": "system", "content": _text(system, self.system_key)}, *found]
        flags = [_pop_train(message, f"message {i}") for i, message in enumerate(found)]
        trainable = tuple(i for i, message in enumerate(found) if message["role"] == "assistant" and flags[i])
        if not trainable:
            roles = ", ".join(message["role"] for message in found)
            silent = any(message["role"] == "assistant" for message in found)
            reason = DropReason.NO_TARGET if silent else DropReason.NO_ASSISTANT
            return Dropped(reason, f"train is false in all assistant turns of {roles}" if silent else f"roles {roles}")
        if not says_something(found[trainable[-1]]):
            return Dropped(DropReason.EMPTY_REPLY, "the last assistant turn is empty")
        images = _take_images(found, row)
        return Conversation(tuple(found), self._tools(row.get(self.tools_key)), self.kind, trainable, images)

    def _chat(self, row: dict[str, Any]) -> list[Message] | Dropped:
        messages = _messages(row.get(self.messages_key), self.messages_key)
        return messages or Dropped(DropReason.NO_ASSISTANT, f"{self.messages_key} is empty")

    def _completion(self, row: dict[str, Any]) -> list[Message] | Dropped:
        if is_blank(row.get("prompt")):
            return Dropped(DropReason.EMPTY_PROMPT, f"prompt is {row.get('prompt')!r}")
        if is_blank(row.get("completion")):
            return Dropped(DropReason.EMPTY_REPLY, f"completion is {row.get('completion')!r}")
        prompt, completion = (_turns(row[key], key, role) for key, role in zip(COMPLETION_KEYS, _SIDES, strict=True))
        # What the prompt quotes of the assistant is no completion.
        return [{**m, "train": False} if m["role"] == "assistant" else m for m in prompt] + completion

    def _alpaca(self, row: dict[str, Any]) -> list[Message] | Dropped:
        instruction, given, output = row.get("instruction"), row.get("input"), row.get("output")
        if is_blank(instruction):
            return Dropped(DropReason.EMPTY_PROMPT, f"instruction is {instruction!r}")
        if is_blank(output):
            return Dropped(DropReason.EMPTY_REPLY, f"output is {output!r}")
        prompt = _text(instruction, "instruction")
        if not is_blank(given):
            prompt += "\n\n" + _text(given, "input")
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": _text(output, "output")}]

    def _tools(self, given: Any) -> tuple[dict[str, Any], ...]:
        tools = _parsed(given, self.tools_key)
        if is_missing(tools):
            return ()
        tools = [tools] if isinstance(tools, dict) else tools
        if not isinstance(tools, list):
            raise DataError(self.tools_key, f"is {tools!r:.80}", fix="store a list of tool schemas, or its JSON text")
        return tuple(_tool(tool, self.tools_key) for tool in tools)


_SIDES = ("user", "assistant")
"""Who says a prompt and a completion that are text."""


def chat_reader(
    rows: RawRows, *, name: str, messages_key: str | None, tools_key: str | None, system_key: str | None
) -> ChatReader:
    """How to read ``rows``; messages win where a dataset has several kinds.

    Args:
        rows: the dataset.
        name: of the dataset, for messages.
        messages_key: the column of the messages; must exist when given, ``messages`` when ``None``.
        tools_key: the same for the tools.
        system_key: the same for the system prompt.

    Raises:
        DataError: a key that is given does not exist, or the rows are of no kind.
    """
    columns = ", ".join(rows.column_names) or "none"
    for key, column in (("messages_key", messages_key), ("tools_key", tools_key), ("system_key", system_key)):
        if column is not None and not rows.has_column(column):
            raise DataError(name, f"{key}={column!r}, but the columns are {columns}", fix=f"set {key} to one of them")
    messages = messages_key or next(filter(rows.has_column, (DEFAULT_MESSAGES_KEY, SHAREGPT_KEY)), None)
    kinds = {Kind.ALPACA: ALPACA_KEYS, Kind.COMPLETION: COMPLETION_KEYS}
    fitting = [kind for kind, keys in kinds.items() if all(map(rows.has_column, keys))]
    if not messages and not fitting:
        raise DataError(name, f"no chat, prompt or Alpaca rows; the columns are {columns}", fix=_fix_columns(rows))
    first = rows[0].get(messages) if messages and len(rows) else None
    return ChatReader(
        kind=Kind.CHAT if messages else fitting[0],
        messages_key=messages or DEFAULT_MESSAGES_KEY,
        tools_key=tools_key or DEFAULT_TOOLS_KEY,
        system_key=system_key or DEFAULT_SYSTEM_KEY,
        nulls_are_padding=rows.nulls_are_padding,
        notices=(SHAREGPT_NOTICE,) if isinstance(first, list) and any(map(_is_sharegpt, first)) else (),
    )


def says_something(message: Message) -> bool:
    """Whether an assistant turn has anything to learn: text, a tool call or reasoning."""
    return any(not is_blank(message.get(key)) for key in ("content", "tool_calls", *REASONING_KEYS))


def is_missing(value: Any) -> bool:
    """Null, or the NaN that tables put where nothing is."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_blank(value: Any) -> bool:
    """Missing, an empty list, or text of blanks only."""
    return is_missing(value) or value == [] or (isinstance(value, str) and not value.strip())


def _messages(given: Any, where: str) -> list[Message]:
    messages = _parsed(given, where)
    if is_missing(messages):
        return []
    if not isinstance(messages, list):
        raise DataError(where, f"is {type(messages).__name__}, not a list of messages", fix=f"store a list of {_FORM}")
    return [_message(message, f"message {i}") for i, message in enumerate(messages)]


def _turns(given: Any, where: str, role: str) -> list[Message]:
    """The messages of a prompt or a completion; one of ``role`` where it is text."""
    return _messages(given, where) if isinstance(given, list) else [{"role": role, "content": _text(given, where)}]


_FORM = "{role, content}"


def _message(message: Any, where: str) -> Message:
    """With a known role, text content, tool calls with objects as arguments, and no nulls."""
    if _is_sharegpt(message):
        message = _from_sharegpt(message)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        found = ", ".join(message) if isinstance(message, dict) else repr(message)[:80]
        raise DataError(where, f"a message needs role and content; found {found}", fix=f"store messages as {_FORM}")
    if message["role"] not in ROLES:
        raise DataError(where, f"unknown role {message['role']!r}", fix=f"write one of {', '.join(ROLES)}")
    clean = {key: value for key, value in message.items() if not is_missing(value)}
    if "content" in clean:
        clean["content"] = _content(clean["content"], where)
    if clean.get("tool_calls"):
        clean["tool_calls"] = _tool_calls(clean["tool_calls"], where)
    else:
        clean.pop("tool_calls", None)
    reasoning = next((clean[key] for key in REASONING_KEYS if key in clean), None)
    if reasoning is not None:
        clean = {"thinking": reasoning, **clean, "reasoning_content": reasoning}
    return clean


def _is_sharegpt(message: Any) -> bool:
    return isinstance(message, dict) and is_missing(message.get("role")) and isinstance(message.get("from"), str)


def _from_sharegpt(message: Message) -> Message:
    rest = {key: value for key, value in message.items() if key not in ("role", "from", "value")}
    speaker, value = message["from"], message.get("value")
    role = SPEAKERS.get(speaker, speaker)
    if speaker == "function_call":
        call = _parsed(value, "a function_call")
        return {**rest, "role": role, "tool_calls": [call] if isinstance(call, dict) else call}
    return {**rest, "role": role, "content": value}


def _pop_train(message: Message, where: str) -> bool:
    """Whether ``message`` may be a target; its flags are taken out."""
    flags = {key: message.pop(key) for key in TRAIN_KEYS if key in message}
    for key, flag in flags.items():
        if flag not in (0, 1):
            raise DataError(where, f"{key} is {flag!r}", fix="write true or false, 1 or 0")
        if key == "train" and flag and message["role"] != "assistant":
            raise DataError(where, f"train is true in a {message['role']} turn", fix="only assistant turns are trained")
    return all(flags.values())


def text_of(content: Any) -> str:
    """The text of a message's content: all of it, or that of its parts."""
    parts = content if isinstance(content, list) else []
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in parts)


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fix = "store text; an object as its JSON text"
        raise DataError(where, f"content is {type(content).__name__}, not text: {content!r:.80}", fix=fix)
    parts = [_part(part, where) for part in content]
    return parts if any(part["type"] == "image" for part in parts) else text_of(parts)


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") or ("image" if "image" in part else "text") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in ("image", "image_url"):
        return {"type": "image", "image": image_of(part)}
    fix = "give parts {type: text, text: ...} and {type: image, image: ...}"
    raise DataError(where, f"a content part that is neither text nor an image: {part!r:.80}", fix=fix)


def _take_images(messages: list[Message], row: dict[str, Any]) -> tuple[Any, ...]:
    """The images of all ``messages``, whose parts only say then that there is one; some may be in the row's own columns."""
    given = row.get("images") if not is_missing(row.get("images")) else row.get("image")
    apart = iter(given if isinstance(given, list) else [] if is_missing(given) else [given])
    images = []
    for number, message in enumerate(messages):
        parts = message.get("content")
        if not isinstance(parts, list):
            continue
        if message["role"] == "assistant":
            fix = "put images into the turns of the user, a tool or the system"
            raise DataError(f"message {number}", "an assistant turn with an image", fix=fix)
        for part in parts:
            if part["type"] == "image":
                image = part.pop("image")
                images.append(next(apart, None) if image is None else image)
                if images[-1] is None:
                    fix = "store it in the part as image, path, bytes or base64, or in order in the column images"
                    raise DataError(f"message {number}", "a part {type: image} without an image", fix=fix)
    if (left := len(list(apart))) and (images or isinstance(given, list)):
        fix = "give each a part {type: image} in its message"
        raise DataError("images", f"{left} more images than parts of messages that ask for one", fix=fix)
    return tuple(images)


def _tool_calls(given: Any, where: str) -> list[dict[str, Any]]:
    calls = _parsed(given, f"{where}: tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        fix = "store a list of {type: function, function: {name, arguments}}"
        raise DataError(where, f"tool_calls is {calls!r:.80}", fix=fix)
    return [_tool_call(call, f"{where}: tool call {i}") for i, call in enumerate(calls)]


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    clean = {key: value for key, value in call.items() if not is_missing(value)}
    if isinstance(clean.get("function"), dict):
        return {**clean, "function": _tool_call(clean["function"], where)}
    if not isinstance(clean.get("name"), str):
        raise DataError(where, f"has no function name: {call!r:.80}", fix="store {function: {name, arguments}}")
    given = clean.get("arguments")
    # A call without arguments is a call with none: some sources write "" or null for {}.
    arguments = {} if is_blank(given) else _parsed(given, f"{where}: arguments")
    if not isinstance(arguments, dict):
        fix = "store an object, or the JSON text of one"
        raise DataError(where, f"arguments are not an object: {given!r:.80}", fix=fix)
    return {**clean, "arguments": arguments}


def _tool(given: Any, where: str) -> dict[str, Any]:
    tool = _parsed(given, where)
    if not isinstance(tool, dict):
        raise DataError(where, f"holds {tool!r:.80}", fix="store each tool as a schema {type: function, function: ...}")
    # A bare function gets the wrapper that every API adds, so that the model sees at inference what it was trained on.
    return {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool


def _parsed(value: Any, where: str) -> Any:
    """``value``, or what its JSON text says; blank text says nothing."""
    if not isinstance(value, str):
        return value
    try:
        return None if is_blank(value) else json.loads(value)
    except json.JSONDecodeError as error:
        fix = "store an object or valid JSON text"
        raise DataError(where, f"is not JSON ({error}): {value!r:.80}", fix=fix) from error


def _without_nulls(value: Any) -> Any:
    """JSON text inside stays as it is: the nulls it has were written there."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    raise DataError(where, f"is {type(value).__name__}, not text: {value!r:.80}", fix="store text")


def _fix_columns(rows: RawRows) -> str:
    if rows.has_column("input_ids"):
        return "tokenized rows go into pretokenized_dataset_paths"
    return (
        "store messages ({role, content} each), prompt and completion, or instruction and output; or set messages_key"
    )
