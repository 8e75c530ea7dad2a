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
    """Reads images by the processor of one model; in any number of threads."""

    def __init__(self, model_path: str, *, trust_remote_code: bool = False, folder: str | None = None) -> None:
        """Load the image processor of ``model_path``; relative paths of images begin in ``folder``.

        Raises:
            DataError: it has none, or Pillow is missing.
        """
        from transformers import AutoImageProcessor

        self._folder = folder
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
        pictures = [self._picture(image, f"image {number}") for number, image in enumerate(images)]
        try:
            found = self._processor(images=pictures, return_tensors="np")
        except ValueError as error:  # such as sides too unlike
            raise DataError("image", f"the model's processor refuses it: {error}", fix="remove the row") from error
        return Images(
            np.asarray(found["pixel_values"], np.float32), np.asarray(found["image_grid_thw"], np.int64).reshape(-1, 3)
        )

    def files(self, images: Sequence[Any]) -> tuple[bytes, ...]:
        """The bytes of each image as they are; PNG of one that has none.

        Raises:
            DataError: one is not there; says which.
        """
        return tuple(self._file(image, f"image {number}") for number, image in enumerate(images))

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

    def _picture(self, image: Any, where: str) -> Any:
        from PIL import Image, UnidentifiedImageError

        file = None if isinstance(image, Image.Image) else self._bytes(image, where)
        try:
            return _upright(image if file is None else Image.open(io.BytesIO(file)))
        except UnidentifiedImageError as error:
            raise DataError(where, f"is no picture, but the bytes {file!r:.40}", fix=_FIX) from error
        except Exception as error:  # whatever a decoder raises, it is this picture that it cannot read
            raise DataError(where, f"cannot be read: {error}", fix=_FIX) from error

    def _file(self, image: Any, where: str) -> bytes:
        from PIL import Image

        if not isinstance(image, Image.Image):
            return self._bytes(image, where)
        stream = io.BytesIO()
        self._picture(image, where).save(stream, "PNG")
        return stream.getvalue()

    def _bytes(self, image: Any, where: str) -> bytes:
        if isinstance(image, Mapping):  # as ``datasets`` keeps one
            image = image.get("bytes") or image.get("path")
        if isinstance(image, bytes | bytearray | memoryview):
            return bytes(image)
        if not isinstance(image, str):
            raise DataError(where, f"is {image!r:.80}", fix=_FIX)
        if image.startswith(("http://", "https://")):
            raise DataError(
                where, f"is the address {image:.80}", fix="fetch it before, and store its bytes or its path"
            )
        kind, _, data = image.partition(";base64,")
        if data and kind.startswith("data:"):
            return _from_base64(data, where, f"is {image[:60]}..., no base64")
        path = Path(self._folder or "", Path(image.removeprefix("file://")).expanduser())
        try:
            return path.read_bytes()
        except (IsADirectoryError, PermissionError) as error:
            raise DataError(where, f"{path} cannot be read: {error.strerror}", fix=_FIX) from error
        except (OSError, ValueError):  # no such file, or no name of one
            return _from_base64(image, where, f"there is no file {path!s:.200}")


def image_of(part: Mapping[str, Any]) -> Any:
    """The image that ``part`` of a message holds or names; None where another column of the row has it."""
    value = next((part[name] for name in SOURCES if part.get(name) is not None), None)
    # As in OpenAI's messages.
    return value.get("url") if isinstance(value, Mapping) and "url" in value else value


def picture_uri(picture: Any, *, largest: int | None = None) -> str:
    """An image of Pillow as a ``data:`` URI, a PNG, its longer side at most ``largest`` pixels."""
    if largest is not None:
        picture = picture.copy()
        picture.thumbnail((largest, largest))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _upright(picture: Any) -> Any:
    """``picture`` in RGB as a camera held it, on white where it is transparent: as ``datasets`` and transformers do."""
    from PIL import Image, ImageOps

    if picture.mode[0] in "IF":
        raise ValueError(f"its pixels are of the kind {picture.mode}, and would be cut to 8 bits, mostly to white")
    picture = ImageOps.exif_transpose(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")


def _from_base64(text: str, where: str, problem: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise DataError(where, problem, fix=_FIX) from error
