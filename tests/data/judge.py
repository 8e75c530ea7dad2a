"""Whether a mask is right, judged without marks: by the generation prompt, and by what a change of each text moves."""

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from burnish.data.chat import Dropped, says_something
from burnish.data.frames import common_prefix
from burnish.data.mask import _LETTERS
from tests.data.shapes import turn
from tests.data.tokenizing import ALL, load, read

SPECIAL = re.compile(
    r"<[|｜][^<>{}\s'\"]+?[|｜]>|<(?:start|end)_of_turn>|<bos>|<eos>|</s>|\[/?INST\]|\[gMASK\]|<sop>|<turn\|>|<end_of_utterance>"
)


THINKING = re.compile(r"</?think>.*", re.DOTALL)
AFTER_TOOL = re.compile(r"(outputs?▁end｜|/outputs\|)>\Z")
ENDS = re.compile(rf"({SPECIAL.pattern})\Z")
USER = turn("user", "Q1")
BEFORE = ([USER], [turn("system", "S"), USER], [USER, turn("assistant", "A"), USER])
"""What a turn may be asked for after."""
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [_LETTERS[ord(letter)] for letter in ALPHABET]


def as_parts(messages):
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} if "content" in m else m for m in messages]


def as_text(messages):
    """With the arguments of tool calls as JSON text."""
    texts = copy.deepcopy(messages)
    for function in (call["function"] for m in texts for call in m.get("tool_calls", ())):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return texts


def with_content(messages):
    return [{"role": m["role"], "content": "", **m} for m in messages]


def _after_content(form):
    return lambda messages: form(with_content(messages))


FORMS = (list, as_text, as_parts, *map(_after_content, (list, as_text, as_parts)))
"""What a template may be given of the same messages."""


def save_bytes_tokenizer(folder: Path, source: str, *, special=(), bos="<|bos|>", eos="<|endoftext|>") -> Path:
    """A token for each byte and each control token of ``source``: no token straddles anything."""
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted({*SPECIAL.findall(source), bos, eos, *special})
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    fast.chat_template = source
    fast.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Verdict:
    word: str
    """right, refused, dropped, unrenderable (the template itself raises), or wrong"""
    detail: str = ""


class Judge:
    """Judges the masks that one template gives."""

    def __init__(self, folder: Path, source: str) -> None:
        save_bytes_tokenizer(folder, source)
        self.ours = load(folder, what=ALL)
        self._plain = PreTrainedTokenizerFast.from_pretrained(folder)
        asked = [self._prompt(form(before)) for form in FORMS for before in BEFORE]
        # A think tag that opens a prompt is header where the template writes it too, and the model's where it does not.
        self._prompts = {p[:end] for p in asked if p for end in range(len(THINKING.sub("", p)), len(p) + 1)}

    def verdict(self, messages: list[dict], tools: list[dict] | None) -> Verdict:
        found = read({"messages": messages, "tools": tools})
        if isinstance(found, Dropped):
            return Verdict("dropped", found.reason)
        plain = [dict(message) for message in found.messages]
        renders = {form: self._render(form(plain), tools) for form in FORMS}
        (example,) = self.ours.encode([found])
        if isinstance(example, Dropped):
            return Verdict("refused" if any(renders.values()) else "unrenderable", example.detail)
        text = self.ours.decode(example.input_ids)
        form = next((form for form, render in renders.items() if render == text), None)
        if form is None or text.encode() != b"".join(self._bytes(example.input_ids)):
            return Verdict("wrong", "other text than the template's")
        spans = self._spans(example)
        spoken = [turn for turn in found.trainable if says_something(found.messages[turn])]
        if len(spans) != len(spoken):
            return Verdict("wrong", f"{len(spans)} runs of targets for {len(spoken)} turns")
        for number, message in enumerate(plain):
            span = dict(zip(spoken, spans, strict=True)).get(number)
            core = (
                None
                if 6 < number < len(plain) - 4
                else self._core(plain, number, text, lambda messages: self._render(form(messages), tools))
            )
            if span is None and core and any(start < core[1] and core[0] < stop for start, stop in spans):
                return Verdict("wrong", f"targets in message {number}, of {message['role']}")
            if span is not None and (fault := self._fault(text, span, core, message)):
                return Verdict(
                    "wrong", f"message {number}: {fault}: {text[slice(*span)]!r} after {text[: span[0]][-30:]!r}"
                )
        return Verdict("right")

    def _fault(self, text: str, span: tuple[int, int], core: tuple[int, int] | None, message: dict) -> str:
        start, stop = span
        if core and not (start <= core[0] and core[1] <= stop):
            return "the text is not all trained"
        if self._prompts and not text[:start].endswith(tuple(self._prompts)) and not AFTER_TOOL.search(text[:start]):
            return "no header before the targets"
        if not self._prompts and core and text[start : core[0]].strip():
            return "a header among the targets"
        if not any("closes no" in notice for notice in self.ours.notices):
            if not ENDS.search(text[:stop]):
                return "no closing token"
            if core and not message.get("tool_calls") and SPECIAL.sub("", text[core[1] : stop]).strip():
                return "more than the text and its closing token"
        return ""

    def _core(self, messages, number, text, render):
        """Where the content of a message, without its outer blanks, comes out; ``None`` where it is changed."""
        content = messages[number].get("content", "")
        core = content.strip()
        if not core or THINKING.search(core):
            return None
        at = content.index(core)
        renders = []
        for place in (at, at + len(core)):
            changed = {**messages[number], "content": content[:place] + "Zq" + content[place:]}
            renders.append(render([*messages[:number], changed, *messages[number + 1 :]]) or "")
        if any(len(render) != len(text) + 2 for render in renders):
            return None
        before = len(common_prefix([text, renders[0]]))
        after = len(common_prefix([text[::-1], renders[1][::-1]]))
        return before, len(text) - after

    def _spans(self, example) -> list[tuple[int, int]]:
        edges = np.flatnonzero(np.diff(example.loss_mask, prepend=0, append=0))
        lengths = [len(self.ours.decode(example.input_ids[:edge])) for edge in edges]
        return list(zip(lengths[::2], lengths[1::2], strict=True))

    def _bytes(self, ids) -> list[bytes]:
        return [self.ours.decode([number]).encode() if number >= 256 else bytes([BYTES[number]]) for number in ids]

    def _prompt(self, messages) -> str:
        whole, without = self._render(messages, None, add_generation_prompt=True), self._render(messages, None)
        return "" if not whole or not without else whole[len(common_prefix([whole, without])) :]

    def _render(self, messages, tools, **more) -> str | None:
        try:
            return self._plain.apply_chat_template(messages, tools=tools, tokenize=False, **more)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return None
