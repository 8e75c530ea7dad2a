"""Random tokens as rows, for runs that measure and learn nothing. Its rule: the same ones each time, on every rank."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from burnish.data.example import Example, IntArray
from burnish.data.store import StoreReport

_SPECIAL = 3
"""Ids from 0 that are never drawn: in most vocabularies the padding and the ends."""


def random_tokens(count: int, *, vocabulary: int, seed: int) -> NDArray[np.int32]:
    """[count] ids below ``vocabulary``."""
    return np.random.default_rng(seed).integers(_SPECIAL, vocabulary, count, dtype=np.int32)


class RandomStore:
    """An ``ExampleStore`` of ``num_rows`` rows of ``length`` tokens, all but the first of them targets, made when read.

    Args:
        num_rows: at least one.
        length: at least 2.
        vocabulary: every id is below it.
        placeholder: an id that is never drawn, that of an image; ``None`` where there is none.
    """

    name = "random"

    def __init__(self, num_rows: int, *, length: int, vocabulary: int, placeholder: int | None = None) -> None:
        self._vocabulary, self._placeholder = vocabulary, placeholder
        self.lengths: IntArray = np.full(num_rows, length)
        self.target_counts: IntArray = self.lengths - 1
        self.num_patches: IntArray = np.zeros(num_rows, np.int64)
        self.fingerprint = hashlib.sha256(f"{num_rows} {length} {vocabulary} {placeholder}".encode()).hexdigest()[:32]
        targets = num_rows * (length - 1)
        self.report = StoreReport(self.name, num_rows, num_rows, {}, num_rows * length, targets)

    def locate(self, index: int) -> str:
        """Where the row stands."""
        return f"random, row {index}"

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        length = int(self.lengths[index])
        ids = random_tokens(length, vocabulary=self._vocabulary, seed=index)
        ids[ids == self._placeholder] = _SPECIAL if self._placeholder != _SPECIAL else _SPECIAL + 1
        mask = np.ones(length, np.uint8)
        mask[0] = 0
        return Example(ids, mask)
