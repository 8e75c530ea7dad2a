"""The image columns of stored rows, checked: the pixels of a row or its compressed images, and the grid of each image.

Null, empty and absent are a text row. Its rule: pixels are never cut, so a row has all of its images or is not used.
"""

import base64
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

IMAGE_COLUMNS = ("pixel_values", "images", "image_grid_thw")
"""An image row has the last, and one of the others."""
IMAGE_TYPES = {
    "pixel_values": pa.large_list(pa.large_list(pa.float32())),
    "images": pa.large_list(pa.large_binary()),
    "image_grid_thw": pa.large_list(pa.large_list(pa.int64())),
}
"""What they are converted to."""
RECORD = np.dtype(
    [
        *(("row", "<i8"), ("data_at", "<i8"), ("kind", "S4"), ("first_image", "<i8")),
        *(("images", "<i4"), ("patches", "<i4"), ("features", "<i4")),
    ]
)
"""What an index holds of an image row: its number, bytes into the shard's Arrow file, the numpy type there, and sizes."""
_MOST_PATCHES = 2**31 - 1
_WHAT_TO_STORE = {
    "pixel_values": "store pixel_values as one list of finite floats a patch, all of one length",
    "images": "store images as the bytes of one file (PNG, JPEG, ...) an image; in JSON as their base64 text",
    "image_grid_thw": "store image_grid_thw as one [time, height, width] an image, whole numbers above 0",
}


@dataclass(frozen=True, slots=True)
class ImageRow:
    """The images of one row."""

    row: int
    """Its number in the batch."""
    data: NDArray[np.floating] | NDArray[np.uint8]
    """[patches, features] pixels in the file's own width, or [bytes] compressed images end to end; a view where the batch
    is plain"""
    grid: NDArray[np.int64]
    """[images, 3] patches along time, height and width"""
    sizes: NDArray[np.int64]
    """[images] bytes of each that is compressed; all 0 for pixels"""

    @property
    def patches(self) -> int:
        """Of all images."""
        return int(self.grid.prod(1).sum())

    @property
    def features(self) -> int:
        """Numbers a patch; 0 where the images are compressed."""
        return self.data.shape[1] if self.data.ndim == 2 else 0


def check_images(batch: pa.RecordBatch, *, place: Place) -> list[ImageRow]:
    """The image rows of ``batch``, which is at ``place``.

    Raises:
        DataError: a row has a grid or images alone, or has them twice, or they do not fit each other.
    """
    if not set(IMAGE_COLUMNS) & set(batch.schema.names):
        return []
    pixels, files, grids = (_filled(batch, name) for name in IMAGE_COLUMNS)
    if len(wrong := np.flatnonzero((pixels & files) | ((pixels | files) != grids))):
        row = int(wrong[0])
        have, lack = ("pixel_values" if pixels[row] else "images"), "image_grid_thw"
        if grids[row]:
            have, lack = "image_grid_thw", "pixel_values or images"
        problem = "has pixel_values and images" if pixels[row] and files[row] else f"has {have} and no {lack}"
        fix = "store image_grid_thw and either pixel_values or images for an image row, none of them for a text row"
        place.reject(row, problem, fix=fix)
    return [_read(batch, int(row), place, compressed=bool(files[row])) for row in np.flatnonzero(grids)]


def check_placeholders(found: NDArray[np.int64], images: Sequence[ImageRow], *, merge_size: int, place: Place) -> None:
    """Compare the placeholder tokens ``found`` in each row, [rows], with what its grids stand for.

    Raises:
        DataError: a row has more or fewer.
    """
    wanted = np.zeros(len(found), np.int64)
    for image in images:
        wanted[image.row] = image.patches // merge_size**2
    if len(bad := np.flatnonzero(found != wanted)):
        problem = f"has {found[bad[0]]} image placeholder tokens, its image_grid_thw stands for {wanted[bad[0]]}"
        place.reject(int(bad[0]), problem, fix="tokenize the row with the model's own processor")


def from_json(value: Any, *, name: str, place: Place) -> list[Any] | None:
    """``value``, which JSON has in the image column ``name`` of the row at ``place``; none for an empty one.

    Raises:
        DataError: it is no list of lists of numbers, all of one length; or of base64 texts.
    """
    if not value:
        return None
    try:
        if name == "images":
            return [base64.b64decode(text, validate=True) for text in value]
        array = np.asarray(value)
    except (ValueError, TypeError):  # of several lengths, or no base64
        _reject(0, name, value, place)
    if array.ndim != 2 or array.dtype.kind not in ("i" if name == "image_grid_thw" else "if"):
        _reject(0, name, value, place)
    lists: list[Any] = array.tolist()
    return lists


def nested_column(images: Sequence[ImageRow], *, name: str, num_rows: int) -> pa.Array:
    """[num_rows] the image column ``name``, null for a row without it; pixels as float32."""
    if name != "image_grid_thw":
        images = [image for image in images if (image.features == 0) == (name == "images")]
    arrays: list[NDArray[Any]] = [image.grid if name == "image_grid_thw" else image.data for image in images]
    kind = {"pixel_values": np.float32, "images": np.uint8, "image_grid_thw": np.int64}[name]
    flat = np.concatenate([np.empty(0, kind), *(array.ravel().astype(kind, copy=False) for array in arrays)])
    lengths, null = np.zeros(num_rows, np.int64), np.ones(num_rows, np.bool_)
    for image, array in zip(images, arrays, strict=True):
        lengths[image.row], null[image.row] = len(image.grid) if name == "images" else len(array), False
    if name == "images":
        ends = np.cumsum([0, *(size for image in images for size in image.sizes)])
        lists = pa.Array.from_buffers(pa.large_binary(), len(ends) - 1, [None, pa.py_buffer(ends), pa.py_buffer(flat)])
    else:
        widths = np.repeat([a.shape[1] for a in arrays], [len(a) for a in arrays]).astype(np.int64)
        lists = pa.LargeListArray.from_arrays(np.cumsum([0, *widths]), flat)
    return pa.LargeListArray.from_arrays(np.cumsum([0, *lengths]), lists, mask=pa.array(null))


def _filled(batch: pa.RecordBatch, name: str) -> NDArray[np.bool_]:
    if name not in batch.schema.names:
        return np.zeros(len(batch), np.bool_)
    column = batch.column(name)
    filled = pc.list_value_length(column).fill_null(0) if is_list(column.type) else column.is_valid()
    return np.asarray(filled, np.bool_)


def _read(batch: pa.RecordBatch, row: int, place: Place, *, compressed: bool) -> ImageRow:
    grid = _nested(batch.column("image_grid_thw")[row], "image_grid_thw", row, place)
    patches = sum(math.prod(image) for image in grid.tolist())
    if grid.shape[1] != 3 or grid.min() < 1 or (compressed and patches > _MOST_PATCHES):
        _reject(row, "image_grid_thw", grid.tolist(), place)
    if compressed:
        files, sizes = _files(batch.column("images")[row], row, place)
        if len(sizes) != len(grid):
            problem = f"images holds {len(sizes)}, image_grid_thw {len(grid)}"
            place.reject(row, problem, fix="store one [time, height, width] for each image")
        return ImageRow(row, files, grid.astype(np.int64), sizes)
    pixels = _nested(batch.column("pixel_values")[row], "pixel_values", row, place)
    if not np.isfinite(pixels).all():
        place.reject(row, "pixel_values holds a number that is not finite", fix=_WHAT_TO_STORE["pixel_values"])
    if len(pixels) != patches:
        problem = f"pixel_values has {len(pixels)} patches, image_grid_thw {grid.tolist()} has {patches}"
        place.reject(row, problem, fix="store the pixels and the grid that the processor gave for the same images")
    return ImageRow(row, pixels, grid.astype(np.int64), np.zeros(len(grid), np.int64))


def _files(value: pa.Scalar, row: int, place: Place) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """[bytes] of all images of a row, end to end, without a copy; and [images] of each."""
    files = value.values if is_list(value.type) else None
    if files is None or not is_bytes(files.type) or files.null_count:
        _reject(row, "images", value.as_py(), place)
    _, offsets, data = files.buffers()
    width = np.int64 if pt.is_large_binary(files.type) else np.int32
    ends = np.frombuffer(offsets, width)[files.offset :][: len(files) + 1].astype(np.int64)
    if (np.diff(ends) < 1).any():
        _reject(row, "images", value.as_py(), place)
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]], np.diff(ends)


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values of this type are bytes that stand one after the other."""
    return bool(pt.is_binary(kind) or pt.is_large_binary(kind))


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
