"""A shuffled order without a list of it: position -> row, a pure function of (size, key).

A Feistel network permutes the numbers below a power of two; a number that is not below ``size`` is sent through again
until it is (cycle walking, Black and Rogaway 2002): at most two turns on average. A few rows are sorted by a hash.
Its rule: what a (size, key) gives never changes between machines and versions; a resumed run leans on it.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from burnish.data.example import IntArray

_ROUNDS = 8
_FEW = 1024
"""Up to so many rows are sorted: faster, and a network of few bits cannot reach all orders equally often."""


def permuted(positions: IntArray, *, size: int, key: Sequence[int]) -> NDArray[np.int64]:
    """The rows at ``positions`` of a shuffle of ``range(size)``.

    Args:
        positions: [any] each in ``range(size)``.
        size: rows that are shuffled.
        key: names the shuffle, such as (seed, epoch).
    """
    assert len(positions) == 0 or (positions.min() >= 0 and positions.max() < size)
    keys = np.frombuffer(hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8 * _ROUNDS).digest(), "<u8")
    if size <= _FEW:
        return np.argsort(_hash(_hash(np.arange(size, dtype=np.uint64) ^ keys[0]) ^ keys[1]))[positions]
    bits = (size - 1).bit_length()
    rows = _scramble(positions.astype(np.uint64), bits, keys)
    while len(outside := np.flatnonzero(rows >= size)):
        rows[outside] = _scramble(rows[outside], bits, keys)
    return rows.astype(np.int64)


def _scramble(numbers: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of the numbers below 2**bits: each half in turn is XORed with a hash of the other."""
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits // 2)) - 1)
    high, low = numbers >> low_bits, numbers & low_mask
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        low = low ^ (_hash(high ^ first) & low_mask)
        high = high ^ (_hash(low ^ second) & high_mask)
    return high << low_bits | low


def _hash(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
