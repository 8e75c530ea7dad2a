"""Prompts become greedy continuations. Its rule: whatever ranks compute, all go on with the same tokens.

There is no cache of keys and values: what a token costs is passing over all weights, which are gathered or handed on
between ranks, and that is shared by the prompts that are answered at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

_AT_ONCE = 8
"""Prompts that are answered at once."""


def continuations(
    prompts: Sequence[Sequence[int]],
    *,
    next_tokens: Callable[[Sequence[Sequence[int]]], Sequence[int]],
    stops: frozenset[int],
    max_new_tokens: int,
) -> list[list[int]]:
    """For each prompt the likeliest token after it, the likeliest after that, and so on, up to one of ``stops``.

    Args:
        prompts: token ids, at least one each.
        next_tokens: the likeliest token after each of some rows; equal on all ranks.
        stops: tokens that end an answer and are no part of it.
        max_new_tokens: most tokens of an answer.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(prompts), _AT_ONCE):
        unfinished = list(range(start, min(start + _AT_ONCE, len(prompts))))
        for _ in range(max_new_tokens):
            found = next_tokens([[*prompts[number], *answers[number]] for number in unfinished])
            told = {number: token for number, token in zip(unfinished, found, strict=True) if token not in stops}
            for number, token in told.items():
                answers[number].append(token)
            unfinished = list(told)
            if not unfinished:
                break
    return answers


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer, by the model's generation config and by its tokenizer."""
    ends = model.generation_config.eos_token_id if model.can_generate() else None
    listed = ends if isinstance(ends, list) else [ends]
    return frozenset(int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None)
