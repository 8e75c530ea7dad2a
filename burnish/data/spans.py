"""Tokens become text again, in spans that are alike: trained or not, special or not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from burnish.data.example import Example


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Neighbouring tokens of one kind."""

    text: str
    trained: bool
    """Whether they are targets."""
    special: bool
    """Whether they are special tokens."""


def decoded_spans(
    example: Example, *, tokenizer: Any, image_token_id: int | None, longest: int | None = None
) -> Iterator[TextSpan]:
    """The whole of ``example`` in spans. Placeholders of images are counted, not repeated.

    Args:
        example: its first token is never a target.
        tokenizer: of the library ``transformers``.
        image_token_id: the placeholder; ``None`` for a model without images.
        longest: tokens of a span that are decoded at most, from its two ends; ``None`` decodes all.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = [int(number) for number in example.input_ids]
    targets = [False, *(bool(flag) for flag in example.loss_mask[1:])]
    kinds = [(t, number in special, number == image_token_id) for number, t in zip(ids, targets, strict=True)]
    for (trained, is_special, is_image), run in groupby(range(len(ids)), key=kinds.__getitem__):
        tokens = [ids[position] for position in run]
        if is_image:
            text = f"{_decoded(tokens[:1], tokenizer)} x {len(tokens)}"
        elif longest is not None and len(tokens) > longest:
            head, tail = tokens[: longest // 2], tokens[-(longest // 2) :]
            left_out = len(tokens) - len(head) - len(tail)
            text = f"{_decoded(head, tokenizer)} [… {left_out:,} tokens …] {_decoded(tail, tokenizer)}"
        else:
            text = _decoded(tokens, tokenizer)
        yield TextSpan(text, trained, is_special)


def _decoded(tokens: Sequence[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
