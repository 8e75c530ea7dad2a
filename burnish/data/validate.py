"""The rows of a batch, checked in the file's own types, become flat arrays. Nothing is cast before it is checked.

Its rule: a row that breaks a rule is named with its file, its number there (from 0), what was found and what to store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from burnish.data.example import IntArray
from burnish.errors import DataError

FORBIDDEN = ("labels", "num_actions")
COLUMNS = ("input_ids", "loss_mask", "attention_mask", "pixel_values", "images", "image_grid_thw", *FORBIDDEN)
"""All other columns of a store are ignored."""

WHAT_TO_STORE = {
    "input_ids": "store the unpadded token ids of a row as a list of integers",
    "loss_mask": "store one 0 or 1 for every token of the row: 1 where the token is to be predicted",
    "attention_mask": "store rows unpadded; attention_mask is then all ones and may be left out",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A stretch of rows in a file."""

    file: Path
    first_row: int

    def reject(self, row: int, problem: str, *, fix: str) -> NoReturn:
        """Raise the error of the ``row``-th row of this stretch."""
        raise DataError(f"{self.file}, row {self.first_row + row}", problem, fix=fix)

    def reject_values(self, row: int, name: str, problem: str) -> NoReturn:
        """Raise the error of what that row has in the column ``name``."""
        self.reject(row, f"{name} {problem}", fix=WHAT_TO_STORE[name])

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse a first row whose columns are not those of a store."""
        for name in FORBIDDEN:
            if name in names:
                fix = "store loss_mask, one 0 or 1 for every token of the row"
                fix += " (1 where labels are not -100), and no labels" if name == "labels" else f", and no {name}"
                self.reject(0, f"has the column {name}", fix=fix)
        for name in ("input_ids", "loss_mask"):
            if names.count(name) != 1:
                problem = f"has no {name}" if name not in names else f"has the column {name} twice"
                self.reject(0, problem, fix=WHAT_TO_STORE[name])


@dataclass(frozen=True, slots=True)
class Rows:
    """Checked rows, end to end."""

    input_ids: IntArray
    """[tokens] in the file's own width; a view where the batch is plain"""
    loss_mask: IntArray
    """[tokens] 0 or 1, likewise; uint8 where the file has booleans"""
    offsets: NDArray[np.int64]
    """[rows + 1] where each row begins, and the end"""


def check_rows(batch: pa.RecordBatch, *, place: Place, num_embeddings: int | None) -> Rows:
    """The rows of ``batch``, which are those at ``place``.

    Args:
        batch: what a reader of ``burnish.data.formats`` gave.
        place: where they are from.
        num_embeddings: rows of the model's embedding; ``None`` skips that check.

    Raises:
        DataError: a row is not what a store holds.
    """
    place.check_names(batch.schema.names)
    ids, offsets = _flat(batch, "input_ids", place)
    mask, mask_offsets = _flat(batch, "loss_mask", place)
    _check_lengths("loss_mask", mask_offsets, offsets, range(len(batch)), place)
    _check_attention(batch, offsets, place)
    _check_ids(ids, offsets, num_embeddings, place)
    if _reach(mask) > 1:
        bad = int(np.flatnonzero((mask > 1) | (mask < 0))[0])
        place.reject_values(_row_of(offsets, bad), "loss_mask", f"must be 0/1, found {mask[bad]}")
    return Rows(ids, mask, offsets)


def _flat(batch: pa.RecordBatch, name: str, place: Place) -> tuple[IntArray, NDArray[np.int64]]:
    """[tokens] the elements of all lists of a column, and [rows + 1] where each row's begin."""
    column = batch.column(name)
    if column.null_count:
        place.reject_values(_first(column.is_null()), name, "is null")
    if not is_list(column.type):
        if "list" in str(column.type):
            place.reject(0, f"{name} has the Arrow type {column.type}", fix="write it as list or large_list")
        place.reject_values(0, name, f"is {describe_value(column[0].as_py())}, no list of integers")
    offsets = list_offsets(column)
    if pt.is_fixed_size_list(column.type):
        values = column.flatten()
    else:
        values = column.values.slice(column.offsets[0].as_py(), offsets[-1])  # flatten() is ten times slower
    if values.null_count:
        place.reject_values(_row_of(offsets, _first(values.is_null())), name, "has a null among its elements")
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pt.is_null(values.type):  # all lists are empty
        return np.empty(0, np.int32), offsets
    if pt.is_boolean(values.type) and name == "loss_mask":
        return values.to_numpy(zero_copy_only=False).view(np.uint8), offsets
    if not pt.is_integer(values.type):
        example = describe_value(values[0].as_py()) if len(values) else "no element"
        problem = f"has elements of type {values.type}, such as {example}, where integers belong"
        place.reject_values(max(0, _row_of(offsets, 0)), name, problem)
    return np.from_dlpack(values), offsets  # type: ignore[return-value]  # to_numpy() imports pandas


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds a list a row."""
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def list_offsets(column: pa.Array) -> NDArray[np.int64]:
    """[rows + 1] where each row begins in ``column.flatten()``; no row is null."""
    if pt.is_fixed_size_list(column.type):
        return np.arange(len(column) + 1, dtype=np.int64) * int(column.type.list_size)
    offsets: NDArray[np.int64] = np.from_dlpack(column.offsets).astype(np.int64)
    offsets -= offsets[0]
    return offsets


def describe_value(value: Any) -> str:
    """A value in a user's words, such as ``a fraction (1.5)``."""
    text = repr(value)
    return f"{_WORDS.get(type(value), type(value).__name__)} ({text if len(text) < 50 else text[:50] + '...'})"


_WORDS: dict[type, str] = {
    **{float: "a fraction", Decimal: "a fraction", str: "text", bool: "a boolean", int: "an integer"},
    **{list: "a list", dict: "an object", type(None): "a null", bytes: "bytes"},
}


def _check_lengths(
    name: str, found: NDArray[np.int64], wanted: NDArray[np.int64], rows: Sequence[int], place: Place
) -> None:
    """Compare a column's lengths at ``rows`` with those of input_ids."""
    if np.array_equal(found, wanted):
        return
    have, want = np.diff(found), np.diff(wanted)[rows]
    if len(bad := np.flatnonzero(have != want)):
        have_one, want_one = have[bad[0]], want[bad[0]]
        fix = WHAT_TO_STORE[name]
        if name == "loss_mask" and have_one < want_one:
            fix += f"; a mask of the last {have_one} tokens alone becomes [0] * {want_one - have_one} + loss_mask"
        place.reject(rows[bad[0]], f"{name} has {have_one} elements for {want_one} input_ids", fix=fix)


def _check_attention(batch: pa.RecordBatch, offsets: NDArray[np.int64], place: Place) -> None:
    """A null is an absent one."""
    name = "attention_mask"
    if name not in batch.schema.names or batch.column(name).null_count == len(batch):
        return
    rows = np.flatnonzero(batch.column(name).is_valid())
    values, found = _flat(batch.take(pa.array(rows)).select([name]), name, place)
    _check_lengths(name, found, offsets, rows.tolist(), place)
    if len(bad := np.flatnonzero(values != 1)):
        row = int(rows[_row_of(found, bad[0])])
        place.reject_values(row, name, f"must be all ones, found {values[bad[0]]}")


def _check_ids(ids: IntArray, offsets: NDArray[np.int64], num_embeddings: int | None, place: Place) -> None:
    limit = 2**63 if num_embeddings is None else num_embeddings
    if _reach(ids) < min(limit, 2 ** (8 * ids.itemsize - 1)):
        return
    fix = WHAT_TO_STORE["input_ids"]
    if ids.min() < 0:
        bad = int(np.flatnonzero(ids < 0)[0])
        if ids[bad] == -100:
            fix += "; -100 marks labels, and these are no labels"
        place.reject(_row_of(offsets, bad), f"input_ids holds {ids[bad]}, an id below 0", fix=fix)
    if int(ids.max()) >= limit:
        bad = int(np.flatnonzero(ids >= limit)[0])
        problem = f"input_ids holds {ids[bad]}; the model has {limit} embedding rows (0 to {limit - 1})"
        place.reject(_row_of(offsets, bad), problem, fix="tokenize with this model's own tokenizer")


def _reach(values: IntArray) -> int:
    """The largest of ``values``, where one below 0 counts as larger than all others: both ends in one pass."""
    return int(values.view(f"u{values.itemsize}").max(initial=0))


def _first(chosen: pa.Array) -> int:
    return int(np.flatnonzero(chosen)[0])


def _row_of(offsets: NDArray[np.int64], element: Any) -> int:
    """The row that the ``element``-th element of a flat column belongs to."""
    return int(np.searchsorted(offsets, element, side="right")) - 1
