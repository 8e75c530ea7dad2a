"""Images of rows are shown: their sizes, how many tokens stand for them, and on a page what the model sees."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from tests.runs.commands import burnish
from tests.toys import chat, write_jsonl
from tests.vision_models import save_vision_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a model, and rows of two images, of none, and of one that is made smaller."""
    folder = tmp_path_factory.mktemp("shown")
    save_vision_model(folder / "model", "qwen2_5_vl")
    parts = [part(picture(0, (24, 16))), part(picture(1, (8, 8))), {"type": "text", "text": "which?"}]
    large = [part(picture(2, (90, 50)))]
    rows = [[parts, "<one>"], ["hello", "two"], [large, "three"]]
    write_jsonl(folder / "rows.jsonl", [chat(*contents) for contents in rows])
    return folder


def picture(seed, size):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), np.uint8))


def part(image):
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return {"type": "image", "base64": base64.b64encode(stream.getvalue()).decode()}


def shown(folder, *more):
    words = ["model.path=model", "train_datasets=[rows.jsonl]", "num_workers=0", "max_length=256"]
    done = burnish("inspect", "rows", *words, *more, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_in_the_terminal(folder):
    printed = shown(folder)
    first, second, third = printed.split("── row ")[1:]
    assert "image 0: 16 x 24 pixels, grid 1 x 4 x 6, 6 placeholder tokens\n" in first
    assert "image 1: 8 x 8 pixels, grid 1 x 2 x 2, 1 placeholder tokens\n" in first
    marks = "<|vision_start|><|image_pad|> x 6<|vision_end|><|vision_start|><|image_pad|> x 1<|vision_end|>"
    assert f"<|im_start|>user\n{marks}which?<|im_end|>\n<|im_start|>assistant\n⟦<one><|im_end|>⟧" in first
    assert "image" not in second
    assert "user\nhello<|im_end|>" in second
    assert "image 0: 16 x 40 pixels, grid 1 x 4 x 10, 10 placeholder tokens\n" in third


def test_on_a_page(folder):
    assert shown(folder, "html=page.html") == "page.html\n"
    page = (folder / "page.html").read_text()
    figures = re.findall(r'<img src="data:image/png;base64,([^"]*)"><figcaption>image \d: (\d+) x (\d+) pixels', page)
    images = [Image.open(io.BytesIO(base64.b64decode(data))) for data, _, _ in figures]
    assert [image.size for image in images] == [(int(width), int(height)) for _, height, width in figures]
    resized = picture(2, (90, 50)).resize((40, 16), Image.Resampling.BICUBIC)
    for image, expected in zip(images, [picture(0, (24, 16)), picture(1, (8, 8)), resized], strict=True):
        assert np.abs(np.asarray(image, int) - np.asarray(expected, int)).max() <= 1
    assert "<b>&lt;|vision_start|&gt;&lt;|image_pad|&gt; x 6&lt;|vision_end|&gt;" not in page, "each kind by itself"
    assert "<b>&lt;|image_pad|&gt; x 6</b>" in page
    assert "http" not in page
