"""Pictures of every kind, and rows as ``datasets`` keeps them: pixels as transformers and ``datasets`` make them."""

import base64
import io

import datasets
import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from burnish.data.pictures import ImageReader
from burnish.errors import DataError

ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    Qwen2VLImageProcessorPil(**sizes, min_pixels=64, max_pixels=1024).save_pretrained(folder)
    return ImageReader(str(folder), folder=str(folder))


def picture(seed=0, size=(24, 16)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), np.uint8))


def saved(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def see_through():
    image = picture().convert("RGBA")
    image.putalpha(Image.fromarray(np.random.default_rng(1).integers(0, 255, (16, 24), np.uint8)))
    return image


def turned(orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return saved(picture(), "JPEG", exif=exif)


def palette(**options):
    return saved(picture().quantize(8), **options)


def moving(kind):
    frames = [picture(seed) for seed in range(3)]
    options = {"lossless": True} if kind == "WEBP" else {}
    return saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=10, **options)


KINDS = {
    "RGB": lambda: saved(picture()),
    "RGBA": lambda: saved(see_through()),
    "gray": lambda: saved(picture().convert("L")),
    "gray with alpha": lambda: saved(see_through().convert("LA")),
    "two colours": lambda: saved(picture().convert("1")),
    "palette": palette,
    "palette with a colour that is none": lambda: palette(transparency=2),
    "palette with alphas": lambda: palette(transparency=bytes([0, 100, 255, 30, 0, 0, 1, 2])),
    "CMYK": lambda: saved(picture().convert("CMYK"), "JPEG"),
    "animated GIF": lambda: moving("GIF"),
    "animated WebP": lambda: moving("WEBP"),
    **{f"turned {number}": lambda number=number: turned(number) for number in range(1, 9)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_datasets_and_transformers(reader, kind):
    file = KINDS[kind]()
    decoded = datasets.Image().decode_example({"bytes": file, "path": None})
    wanted = reader._processor(images=[convert_to_rgb(decoded, return_numpy=True)], return_tensors="np")
    for given in (file, {"bytes": file, "path": "x.png"}, decoded, base64.b64encode(file).decode()):
        read = reader.read([given])
        assert np.array_equal(read.pixel_values, wanted["pixel_values"])
        assert np.array_equal(read.grid_thw, wanted["image_grid_thw"])
        again = reader.read(reader.files([given]))
        assert np.array_equal(again.pixel_values, read.pixel_values)
        assert np.array_equal(again.grid_thw, read.grid_thw)


def test_a_moving_picture_is_its_first_frame(reader):
    assert np.array_equal(reader.read([moving("WEBP")]).pixel_values, reader.read([picture(0)]).pixel_values)


def test_a_turned_picture_is_read_upright(reader):
    assert reader.read([turned(1)]).grid_thw.tolist() == [[1, 4, 6]]
    assert reader.read([turned(6)]).grid_thw.tolist() == [[1, 6, 4]]


def bomb(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    return saved(picture())


BROKEN = {
    "cut JPEG": (lambda _: saved(picture(), "JPEG")[:-20], "image 0: cannot be read: .*truncated"),
    "cut PNG": (lambda _: saved(picture())[:-100], "image 0: cannot be read: "),
    "a wrong checksum": (
        lambda _: saved(picture())[:200] + b"\0" * 8 + saved(picture())[208:],
        "image 0: cannot be read: ",
    ),
    "empty": (lambda _: {"bytes": b"", "path": None}, "image 0: is None"),
    "a bomb": (bomb, "image 0: cannot be read: .*decompression bomb"),
    "16 bits": (lambda _: saved(Image.fromarray(np.full((16, 16), 5000, np.uint16))), "of the kind I;16"),
    "floats": (lambda _: saved(Image.fromarray(np.full((16, 16), 0.5, np.float32)), "TIFF"), "of the kind F"),
    "a data URL that is none": (
        lambda _: "data:image/png;base64,iVBORw0KGgo%%",
        "image 0: is data:image/png.* no base64",
    ),
    "a data URL cut short": (lambda _: "data:image/png;base64,iVBOR", "image 0: is data:image/png.* no base64"),
    "a data URL of another thing": (lambda _: "data:image/png;base64,aGVsbG8=", "image 0: is no picture, .*b'hello'"),
    "a folder": (lambda _: "/usr", "image 0: /usr cannot be read: Is a directory"),
    "no file": (lambda _: "cat.jpg", "image 0: there is no file /.*/cat.jpg"),
    "a number": (lambda _: 3, "image 0: is 3"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_read_is_named(reader, monkeypatch, kind):
    make, said = BROKEN[kind]
    with pytest.raises(DataError, match=said):
        reader.read([make(monkeypatch)])


def test_base64_in_lines_is_read(reader):
    text = base64.encodebytes(saved(picture())).decode()
    wanted = reader.read([picture()]).pixel_values
    assert np.array_equal(reader.read([text]).pixel_values, wanted)
    assert np.array_equal(reader.read([f"data:image/png;base64,{text}"]).pixel_values, wanted)
