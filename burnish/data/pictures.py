"""The images that raw rows hold or name become what a model's tower takes: patches, and the grid of each image.

The rule: an image is the bytes of its row or a file that its row names; nothing is fetched over a network.
"""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from burnish.data.example import Images
from burnish.errors import DataError

SOURCES = ("image", "path", "bytes", "base64", "url", "image_url")
"""Names under which a part of a message holds its image."""
_FIX = "store the image's bytes, or the path of a file that is there"


class ImageReader:
    """Reads images by the processor of one model."""

    def __init__(self, model_path: str, *, trust_remote_code: bool = False) -> None:
        """Load the image processor of ``model_path``.

        Raises:
            DataError: it has none, or Pillow is missing.
        """
        from transformers import AutoImageProcessor

        if find_spec("PIL") is None:
            raise DataError(
                model_path, "images need Pillow, which is not installed", fix="pip install 'burnish[images]'"
            )
        try:
            # The one that needs no torchvision; in every process the same.
            self._processor: Any = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                model_path, backend="pil", trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, ImportError) as error:
            problem = f"its image processor cannot be loaded ({str(error).strip().splitlines()[0]})"
            fix = "save the model's processor into the folder (preprocessor_config.json)"
            raise DataError(model_path, problem, fix=fix) from error

    @property
    def description(self) -> str:
        """Changes with everything that decides the patches."""
        return str(self._processor.to_json_string())

    def read(self, images: Sequence[Any]) -> Images:
        """The patches of ``images``, one or more, in their order.

        Raises:
            DataError: one cannot be read; says which.
        """
        pictures = [_picture(image, f"image {number}") for number, image in enumerate(images)]
        try:
            found = self._processor(images=pictures, return_tensors="np")
        except ValueError as error:  # such as sides too unlike
            raise DataError("image", f"the model's processor refuses it: {error}", fix="remove the row") from error
        return Images(
            np.asarray(found["pixel_values"], np.float32), np.asarray(found["image_grid_thw"], np.int64).reshape(-1, 3)
        )

    def pictures(self, images: Images) -> Iterator[Any]:
        """What the model sees of ``images``, as images of Pillow; of one that lasts, its first moment."""
        from PIL import Image

        found = self._processor
        patch, merge, first = found.patch_size, found.merge_size, 0
        for time, height, width in images.grid_thw.tolist():
            patches = images.pixel_values[first : first + height * width].astype(np.float32)
            first += time * height * width
            # Squares of ``merge`` patches, and in them patches, go row by row; each patch is [colour, time, height, width].
            blocks = patches.reshape(height // merge, width // merge, merge, merge, 3, -1, patch, patch)
            pixels = blocks[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * patch, width * patch, 3)
            shades = (pixels * found.image_std + found.image_mean) / found.rescale_factor
            yield Image.fromarray(np.rint(shades).clip(0, 255).astype(np.uint8))


def image_of(part: Mapping[str, Any]) -> Any:
    """The image that ``part`` of a message holds or names; None where another column of the row has it."""
    value = next((part[name] for name in SOURCES if part.get(name) is not None), None)
    # As in OpenAI's messages.
    return value.get("url") if isinstance(value, Mapping) and "url" in value else value


def _picture(image: Any, where: str) -> Any:
    from PIL import Image, UnidentifiedImageError

    if isinstance(image, Image.Image):
        return image.convert("RGB")
    try:
        with Image.open(io.BytesIO(_bytes(image, where))) as opened:
            return opened.convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise DataError(where, f"cannot be read: {error}", fix=_FIX) from error


def _bytes(image: Any, where: str) -> bytes:
    if isinstance(image, Mapping):  # as ``datasets`` keeps one
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if not isinstance(image, str):
        raise DataError(where, f"is {image!r:.80}", fix=_FIX)
    if image.startswith(("http://", "https://")):
        raise DataError(where, f"is the address {image:.80}", fix="fetch it before, and store its bytes or its path")
    kind, _, data = image.partition(";base64,")
    if data and kind.startswith("data:"):
        return base64.b64decode(data)
    if path := _file(image.removeprefix("file://")):
        return path.read_bytes()
    try:
        return base64.b64decode(image, validate=True)
    except ValueError as error:
        raise DataError(where, f"there is no file {image:.200}", fix=_FIX) from error


def _file(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.is_file() else None
    except OSError:  # base64 is too long for a name
        return None
