"""The image columns of stored rows, checked: the pixels of a row as [patches, features], and the grid of each image.

Null, empty and absent are a text row. Its rule: pixels are never cut, so a row has all of its images or is not used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from burnish.data.validate import Place, is_list, list_offsets

IMAGE_COLUMNS = ("pixel_values", "image_grid_thw")
IMAGE_TYPES = {
    "pixel_values": pa.large_list(pa.large_list(pa.float32())),
    "image_grid_thw": pa.large_list(pa.large_list(pa.int64())),
}
"""What they are converted to."""
RECORD = np.dtype(
    [
        *(("row", "<i8"), ("pixels_at", "<i8"), ("kind", "S4"), ("first_image", "<i8")),
        *(("images", "<i4"), ("patches", "<i4"), ("features", "<i4")),
    ]
)
"""What an index holds of an image row: its number, bytes into the shard's Arrow file, the pixels' numpy type, and sizes."""
_WHAT_TO_STORE = {
    "pixel_values": "store pixel_values as one list of finite floats a patch, all of one length",
    "image_grid_thw": "store image_grid_thw as one [time, height, width] an image, whole numbers above 0",
}


@dataclass(frozen=True, slots=True)
class ImageRow:
    """The images of one row."""

    row: int
    """Its number in the batch."""
    pixels: NDArray[np.floating]
    """[patches, features] in the file's own width; a view where the batch is plain"""
    grid: NDArray[np.int64]
    """[images, 3] patches along time, height and width"""


def check_images(batch: pa.RecordBatch, *, place: Place) -> list[ImageRow]:
    """The image rows of ``batch``, which is at ``place``.

    Raises:
        DataError: a row has one of the two columns alone, or they do not fit each other.
    """
    if not set(IMAGE_COLUMNS) & set(batch.schema.names):
        return []
    pixels, grids = _filled(batch, "pixel_values"), _filled(batch, "image_grid_thw")
    if len(lone := np.flatnonzero(pixels != grids)):
        have, lack = IMAGE_COLUMNS if pixels[lone[0]] else IMAGE_COLUMNS[::-1]
        fix = "store both for an image row, neither for a text row"
        place.reject(int(lone[0]), f"has {have} and no {lack}", fix=fix)
    return [_read(batch, int(row), place) for row in np.flatnonzero(pixels)]


def check_placeholders(found: NDArray[np.int64], images: Sequence[ImageRow], *, merge_size: int, place: Place) -> None:
    """Compare the placeholder tokens ``found`` in each row, [rows], with what its grids stand for.

    Raises:
        DataError: a row has more or fewer.
    """
    wanted = np.zeros(len(found), np.int64)
    for image in images:
        wanted[image.row] = len(image.pixels) // merge_size**2
    if len(bad := np.flatnonzero(found != wanted)):
        problem = f"has {found[bad[0]]} image placeholder tokens, its image_grid_thw stands for {wanted[bad[0]]}"
        place.reject(int(bad[0]), problem, fix="tokenize the row with the model's own processor")


def rectangle(value: Any, *, name: str, place: Place) -> list[list[Any]] | None:
    """``value``, which JSON has in the image column ``name`` of the row at ``place``; none for an empty one.

    Raises:
        DataError: it is no list of lists of numbers, all of one length.
    """
    if not value:
        return None
    try:
        array = np.asarray(value)
    except ValueError:  # of several lengths
        _reject(0, name, value, place)
    if array.ndim != 2 or array.dtype.kind not in ("i" if name == "image_grid_thw" else "if"):
        _reject(0, name, value, place)
    lists: list[list[Any]] = array.tolist()
    return lists


def nested_column(images: Sequence[ImageRow], *, name: str, num_rows: int) -> pa.Array:
    """[num_rows] the image column ``name``, null for a text row; pixels as float32."""
    arrays: list[NDArray[Any]] = [image.grid if name == "image_grid_thw" else image.pixels for image in images]
    kind = np.int64 if name == "image_grid_thw" else np.float32
    flat = np.concatenate([np.empty(0, kind), *(array.ravel().astype(kind) for array in arrays)])
    widths = np.repeat([a.shape[1] for a in arrays], [len(a) for a in arrays]).astype(np.int64)
    lists = pa.LargeListArray.from_arrays(np.cumsum([0, *widths]), flat)
    lengths, null = np.zeros(num_rows, np.int64), np.ones(num_rows, np.bool_)
    for image, array in zip(images, arrays, strict=True):
        lengths[image.row], null[image.row] = len(array), False
    return pa.LargeListArray.from_arrays(np.cumsum([0, *lengths]), lists, mask=pa.array(null))


def _filled(batch: pa.RecordBatch, name: str) -> NDArray[np.bool_]:
    if name not in batch.schema.names:
        return np.zeros(len(batch), np.bool_)
    column = batch.column(name)
    filled = pc.list_value_length(column).fill_null(0) if is_list(column.type) else column.is_valid()
    return np.asarray(filled, np.bool_)


def _read(batch: pa.RecordBatch, row: int, place: Place) -> ImageRow:
    grid, pixels = (_nested(batch.column(name)[row], name, row, place) for name in reversed(IMAGE_COLUMNS))
    if grid.shape[1] != 3 or grid.min() < 1:
        _reject(row, "image_grid_thw", grid.tolist(), place)
    if not np.isfinite(pixels).all():
        place.reject(row, "pixel_values holds a number that is not finite", fix=_WHAT_TO_STORE["pixel_values"])
    patches = sum(math.prod(image) for image in grid.tolist())
    if len(pixels) != patches:
        problem = f"pixel_values has {len(pixels)} patches, image_grid_thw {grid.tolist()} has {patches}"
        place.reject(row, problem, fix="store the pixels and the grid that the processor gave for the same images")
    return ImageRow(row, pixels, grid.astype(np.int64))


def _nested(value: pa.Scalar, name: str, row: int, place: Place) -> NDArray[Any]:
    """A list of lists as a rectangle, without a copy."""
    is_kind = pt.is_integer if name == "image_grid_thw" else pt.is_floating
    lists = value.values if is_list(value.type) else None
    if lists is None or not is_list(lists.type) or not is_kind(lists.type.value_type) or lists.null_count:
        _reject(row, name, value.as_py(), place)
    offsets = list_offsets(lists)
    first = 0 if pt.is_fixed_size_list(lists.type) else lists.offsets[0].as_py()
    flat = lists.flatten() if pt.is_fixed_size_list(lists.type) else lists.values.slice(first, offsets[-1])
    if flat.null_count or len(set(np.diff(offsets).tolist())) != 1 or not len(flat):
        _reject(row, name, value.as_py(), place)
    rectangle: NDArray[Any] = flat.to_numpy().reshape(len(lists), -1)
    return rectangle


def _reject(row: int, name: str, value: Any, place: Place) -> NoReturn:
    text = repr(value)
    place.reject(row, f"{name} is {text if len(text) < 60 else text[:60] + '...'}", fix=_WHAT_TO_STORE[name])
