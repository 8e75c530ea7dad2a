"""Conversations become examples: one render, encoded once, its targets proven on the tokens.

The rule: a mask is proven or the row is dropped. Never a shifted mask.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from burnish.config.choices import TrainOnWhat, Truncation
from burnish.data.chat import Conversation, Dropped, DropReason, says_something
from burnish.data.encoder import Encoder, Ids
from burnish.data.example import Example, Images, IntArray
from burnish.data.frames import UnprovenError
from burnish.data.mask import TokenMasker
from burnish.data.pictures import ImageReader
from burnish.data.template import TEMPLATE_FAULTS, MarkedTemplate, Span
from burnish.data.turns import TurnFinder
from burnish.errors import DataError

NUM_VERIFIED = 32
"""First rows of a process whose text is compared with what transformers renders, besides those of a new shape."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of a chat template that are not the user's to set."""


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """Everything about the tokenizer that decides the rows of a store."""

    model_path: str
    """Folder or hub id that has the tokenizer."""
    chat_template: str | None = None
    """A file or a text in place of the tokenizer's own template."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    max_length: int | None = None
    truncation: Truncation = Truncation.RIGHT
    image_token_id: int | None = None
    """Placeholder of a model that takes images."""
    image_merge_size: int = 1
    """Patches along each side that one placeholder stands for."""
    compressed_images: bool = False
    """Whether examples keep the images as they are, instead of pixels."""
    image_folder: str | None = None
    """Where relative paths of images begin."""

    def load(self) -> "ConversationTokenizer":
        """The tokenizer of these settings."""
        return ConversationTokenizer(self)


class ConversationTokenizer:
    """Tokenizes conversations with one tokenizer and one chat template."""

    def __init__(self, settings: TokenizerSettings) -> None:
        """Load the tokenizer that ``settings`` name.

        Raises:
            DataError: there is no fast tokenizer, or no chat template.
        """
        self._settings = settings
        self._tokenizer = _load_tokenizer(settings.model_path, settings.trust_remote_code)
        if settings.chat_template is not None:
            self._tokenizer.chat_template = template_text(settings.chat_template)
        # A tokenizer.json may carry a truncation of its own, which would cut rows without a word.
        self._tokenizer.backend_tokenizer.no_truncation()
        self._tokenizer.backend_tokenizer.no_padding()
        self._sources = {with_tools: self._source(settings.model_path, with_tools) for with_tools in (False, True)}
        self._kwargs = dict(settings.chat_template_kwargs)
        if reserved := sorted(RESERVED & self._kwargs.keys()):
            where = f"chat_template_kwargs={self._kwargs}"
            raise DataError(where, f"{', '.join(reserved)} come from the rows", fix="leave them out")
        self._finders = self._make_finders()
        self._encoder = Encoder(self._tokenizer.backend_tokenizer)
        self._num_to_verify = NUM_VERIFIED

    @cached_property
    def _masker(self) -> TokenMasker:
        """Made when a row needs it: a store that the cache has needs none."""
        return TokenMasker(self._tokenizer, self._encoder)

    @cached_property
    def _images(self) -> ImageReader:
        """Made when a row has an image."""
        settings = self._settings
        return ImageReader(
            settings.model_path, trust_remote_code=settings.trust_remote_code, folder=settings.image_folder
        )

    @property
    def tokenizer_hash(self) -> str:
        """Of all in the tokenizer that decides ids."""
        return _digest([self._tokenizer.backend_tokenizer.to_str(), self._tokenizer.special_tokens_map])

    @property
    def takes_images(self) -> bool:
        """Whether its rows may have images."""
        return self._settings.image_token_id is not None

    @property
    def image_description(self) -> list[str | bool | None]:
        """Of all that decides what is kept of an image; empty where there are none."""
        settings = self._settings
        kept = [settings.compressed_images, settings.image_folder]
        return [self._images.description, *kept] if self.takes_images else []

    @property
    def template_hash(self) -> str:
        """Of the chat template and its kwargs."""
        return _digest([self._sources[False], self._sources[True], self._kwargs])

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self._tokenizer)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Such as ``{"eos_token": "<|im_end|>"}``."""
        return {name: text for name, text in self._tokenizer.special_tokens_map.items() if isinstance(text, str)}

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know of the template, and of the rows so far."""
        found = set(self._masker.notices)
        if any("strftime_now" in source for source in self._sources.values()):
            found.add("the chat template writes the date of the day it runs; fix it in chat_template_kwargs")
        for finder in self._finders.values():
            found |= finder.notices
        return tuple(sorted(found))

    def encode(self, conversations: Sequence[Conversation]) -> list[Example | Dropped]:
        """For each conversation its example, or why there is none.

        Raises:
            DataError: a row is too long and ``truncation`` is ``error``, or transformers renders another text.
        """
        found = [self._find(conversation) for conversation in conversations]
        ids = iter(self._encoder.encode([each[0] for each in found if not isinstance(each, Dropped)]))
        return [
            each if isinstance(each, Dropped) else self._example(*each, next(ids), conversation.images)
            for each, conversation in zip(found, conversations, strict=True)
        ]

    def try_fast_engine(self, conversations: Sequence[Conversation]) -> bool:
        """Encode with gigatoken from here on, where it gives the same ids for ``conversations``."""
        found = [self._find(conversation) for conversation in conversations]
        return self._encoder.try_fast([each[0] for each in found if not isinstance(each, Dropped)])

    def use_fast_engine(self) -> None:
        """Encode with gigatoken from here on, as ``try_fast_engine`` found in another process."""
        self._encoder.use_fast()

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of ``text`` as a user's turn, up to where an answer begins.

        Raises:
            DataError: the chat template cannot render it.
        """
        messages = self._finders[False].prepare([{"role": "user", "content": text}])
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._kwargs
            )
        except TEMPLATE_FAULTS as error:
            fix = "ask what the template can render, or give another chat_template"
            raise DataError(f"prompt {text!r:.200}", f"the chat template raises {error}", fix=fix) from error
        return [int(number) for number in self._encoder.encode([rendered])[0]]

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text of ``ids``, special tokens included."""
        numbers = [int(number) for number in ids]
        return str(self._tokenizer.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _find(self, conversation: Conversation) -> tuple[str, list[Span]] | Dropped:
        # An empty turn teaches nothing but to say nothing, so it is no target, wherever it stands.
        spoken = [turn for turn in conversation.trainable if says_something(conversation.messages[turn])]
        turns = spoken if self._settings.train_on_what == TrainOnWhat.ALL_ASSISTANT_MESSAGES else spoken[-1:]
        finder = self._finders[bool(conversation.tools)]
        try:
            text, spans, is_new = finder.find(conversation, turns=turns)
        except UnprovenError as reason:
            return Dropped(DropReason.UNPROVEN_SPAN, str(reason))
        if is_new or self._num_to_verify > 0:
            self._num_to_verify -= 1
            self._verify(text, conversation, finder)
        return text, spans

    def _example(self, text: str, spans: Sequence[Span], ids: Ids, given: Sequence[Any] = ()) -> Example | Dropped:
        try:
            mask = self._masker.mask(text, spans, ids)
        except UnprovenError as reason:
            return Dropped(DropReason.UNPROVEN_SPAN, str(reason))
        images = self._read_images(ids, given)
        if images:
            mask, ids = self._spread(mask, images, ids), self._spread(ids, images)
            if self._settings.max_length is not None and len(ids) > self._settings.max_length:
                return Dropped(DropReason.IMAGE_TOO_LONG, f"{len(ids)} tokens")
        length, max_length, truncation = len(mask), self._settings.max_length, self._settings.truncation
        if max_length is not None and length > max_length:
            if truncation == Truncation.ERROR:
                fix = "raise max_length, or set truncation to right or drop"
                raise DataError(f"max_length={max_length}", f"the row has {length} tokens", fix=fix)
            if truncation == Truncation.DROP:
                return Dropped(DropReason.TOO_LONG, f"{length} tokens")
        example = Example(ids[:max_length], mask[:max_length], images)
        if not example.loss_mask[1:].any():
            return Dropped(DropReason.NO_TARGET, f"{length} tokens, no target in the first {len(example.input_ids)}")
        return example

    def _read_images(self, ids: Ids, given: Sequence[Any]) -> Images | None:
        """Those of a row with ``ids``, which has one placeholder for each.

        Raises:
            DataError: it has more or fewer placeholders, or one cannot be read.
        """
        placeholder = self._settings.image_token_id
        if given and placeholder is None:
            raise DataError("messages", "an image, and the model takes none", fix="name a vision-language model")
        count = int(np.count_nonzero(ids == placeholder)) if placeholder is not None else 0
        if count != len(given):
            problem = f"{len(given)} images, and {count} placeholder tokens in the rendered text"
            raise DataError("messages", problem, fix="use the model's own chat template, and no placeholder in a text")
        if not given:
            return None
        if not self._settings.compressed_images:
            return self._images.read(given)
        files = self._images.files(given)
        read = self._images.read(files)
        return Images(read.pixel_values[:0], read.grid_thw, files)

    def _spread(self, values: Any, images: Images, ids: Ids | None = None) -> Any:
        """``values`` of the tokens ``ids``, by default themselves, with each placeholder as often as its image has tokens."""
        repeats = np.ones(len(values), np.int64)
        tokens = images.grid_thw.prod(1) // self._settings.image_merge_size**2
        repeats[(values if ids is None else ids) == self._settings.image_token_id] = tokens
        return np.repeat(values, repeats)

    def _verify(self, text: str, conversation: Conversation, finder: TurnFinder) -> None:
        messages, tools = finder.prepare(conversation.messages), list(conversation.tools) or None
        expected = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **self._kwargs)
        if text != expected:
            problem = f"transformers renders {expected!r:.200} where Burnish renders {text!r:.200}"
            raise DataError(
                "chat template", problem, fix="report this with the template and the version of transformers"
            )

    def _source(self, model_path: str, with_tools: bool) -> str:
        try:
            return str(self._tokenizer.get_chat_template(None, [{}] if with_tools else None))
        except ValueError as error:
            fix = "set chat_template to a template file or text, or take an instruction-tuned model"
            raise DataError(model_path, f"its tokenizer has no chat template ({error})", fix=fix) from error

    def _make_finders(self) -> dict[bool, TurnFinder]:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        variables = {**self._tokenizer.special_tokens_map, **self._kwargs}
        special = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        finders: dict[str, TurnFinder] = {}
        for source in self._sources.values():
            if source not in finders:
                try:
                    template = MarkedTemplate(_compile_jinja_template(source), source=source)
                except TEMPLATE_FAULTS as error:
                    raise DataError(
                        "chat template", f"does not compile: {error}", fix="correct the template"
                    ) from error
                finders[source] = TurnFinder(template, variables=variables, special_tokens=special)
        return {with_tools: finders[source] for with_tools, source in self._sources.items()}


def _load_tokenizer(model_path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(model_path, f"its tokenizer cannot be loaded ({error})", fix="check model.path") from error
    if not tokenizer.is_fast:
        fix = "save it with a tokenizer.json (a fast tokenizer)"
        raise DataError(model_path, f"its tokenizer is a {type(tokenizer).__name__} without positions", fix=fix)
    return tokenizer


def template_text(given: str) -> str:
    """``given`` when it is a template, else the text of the file that it names."""
    if "{{" in given or "{%" in given or "\n" in given:
        return given
    file = Path(given)
    if not file.is_file():
        raise DataError(f"chat_template={given}", "is neither a template nor a file", fix="give a Jinja text or a file")
    return file.read_text(encoding="utf-8")


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
