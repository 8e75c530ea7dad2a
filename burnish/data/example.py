"""Example: one tokenized row, the only form in which rows travel. Its rule: never padded, never shifted."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Images:
    """The images of one example, in the order of their placeholder tokens."""

    pixel_values: NDArray[np.floating]
    """[patches, features]"""
    grid_thw: IntArray
    """[images, 3]: patches along time, height and width"""
    files: tuple[bytes, ...] = ()
    """[images] compressed; only on the way into a store that holds these instead of pixels"""


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids and, position by position, whether the token is a target.

    ``loss_mask[i] == 1`` asks the model to predict ``input_ids[i]`` from the tokens before it, so
    ``loss_mask[0]`` is never counted.
    """

    input_ids: IntArray
    """[length] in the store's own integer width"""
    loss_mask: NDArray[np.uint8]
    """[length] 0 or 1"""
    images: Images | None = None


class ExampleStore(Protocol):
    """Finite and random access; sizes are known without reading rows."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Changes when the rows, their order or their sizes change; compared on resume."""
        ...

    @property
    def lengths(self) -> IntArray:
        """[rows] tokens of each row, after truncation."""
        ...

    @property
    def target_counts(self) -> IntArray:
        """[rows] targets of each row, after truncation; position 0 is not counted."""
        ...

    @property
    def num_patches(self) -> IntArray:
        """[rows] image patches of each row; 0 is a text row."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...

    def locate(self, index: int) -> str:
        """Where the row stands at its source: ``file, row n``."""
        ...
