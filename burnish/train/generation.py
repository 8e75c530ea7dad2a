"""Prompts are answered with the weights as they are, in evaluations: what a model says, beside its loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from burnish.backends.base import Backend
from burnish.train.cadence import Cadence

Answers = Sequence[tuple[str, str]]
"""(prompt, answer) of each prompt."""


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked, and in which evaluations."""

    prompts: Sequence[str]
    """As the user wrote them."""
    token_ids: Sequence[Sequence[int]]
    """Of each prompt, as the model's chat template writes it before an answer."""
    decode: Callable[[Sequence[int]], str]
    at: Cadence
    """Counts evaluations: 0 is the one before the first step."""
    max_new_tokens: int
    """Most tokens of an answer."""

    def answers(self, backend: Backend) -> Answers:
        """Those of ``backend``, all ranks of which ask; equal on all of them. Changes nothing."""
        found = backend.generate(self.token_ids, max_new_tokens=self.max_new_tokens)
        return list(zip(self.prompts, map(self.decode, found), strict=True))
