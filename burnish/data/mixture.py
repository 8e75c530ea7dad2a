"""Several stores as one: global row numbers run through them in the order given."""

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burnish.data.example import Example, ExampleStore, IntArray


class Mixture:
    """An ``ExampleStore`` over all of ``stores``; *source* s is the store at place s."""

    def __init__(self, stores: Sequence[ExampleStore]) -> None:
        self.stores = tuple(stores)
        self.starts: NDArray[np.int64] = np.cumsum([0, *(len(store) for store in stores)])
        """[sources + 1] global number of each source's first row, and the number of rows"""

    @property
    def name(self) -> str:
        return " + ".join(store.name for store in self.stores)

    @cached_property
    def fingerprint(self) -> str:
        """Of the stores' fingerprints in their order."""
        return hashlib.sha256("\n".join(store.fingerprint for store in self.stores).encode()).hexdigest()[:32]

    @cached_property
    def lengths(self) -> IntArray:
        """[rows] tokens of each row, after truncation."""
        return _joined([store.lengths for store in self.stores])

    @cached_property
    def target_counts(self) -> IntArray:
        """[rows] targets of each row, after truncation; position 0 is not counted."""
        return _joined([store.target_counts for store in self.stores])

    @cached_property
    def num_patches(self) -> IntArray:
        """[rows] image patches of each row; 0 is a text row."""
        return _joined([store.num_patches for store in self.stores])

    def source_of(self, rows: ArrayLike) -> NDArray[np.int64]:
        """The number of the source of each of ``rows``, in their shape."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def locate(self, index: int) -> str:
        """Where the row stands at its source: ``file, row n``."""
        source, row = self._place(index)
        return self.stores[source].locate(row)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Example:
        source, row = self._place(index)
        return self.stores[source][row]

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        source = int(self.source_of(index))
        return source, int(index - self.starts[source])


def _joined(parts: Sequence[IntArray]) -> IntArray:
    """One store's array stays the mapped file it is."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
