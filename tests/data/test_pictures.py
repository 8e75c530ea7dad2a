"""Chat rows with images: what is read, where their tokens stand, and what is refused."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from burnish.data.chat import Dropped
from burnish.data.example import Images
from burnish.data.pictures import ImageReader
from burnish.data.tokenize import TokenizerSettings
from burnish.data.write import write_store
from burnish.errors import DataError
from tests.toys import write_jsonl
from tests.vision_models import BEGIN, END, IMAGE, MERGE, save_vision_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def picture(seed=0, size=(24, 16)):
    pixels = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), np.uint8)
    return Image.fromarray(pixels)


def as_bytes(image, kind="PNG"):
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def base64_of(image):
    return base64.b64encode(as_bytes(image)).decode()


def row(*parts, answer="yes", **columns):
    messages = [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **columns}


def encoded(model_dir, tmp_path, *rows, **settings):
    """The rows of the store that is made of ``rows``."""
    from burnish.data.store import open_store

    source = {
        "split": None,
        "tokenizer_settings": TokenizerSettings(
            str(model_dir), image_token_id=IMAGE, image_merge_size=MERGE, **settings
        ),
        "messages_key": None,
        "tools_key": None,
        "system_key": None,
        "num_workers": 0,
        "cache_dir": str(tmp_path / "cache"),
        "force_recache": False,
        "disable_cache": False,
    }
    out = tmp_path / "store"
    write_store(str(write_jsonl(tmp_path / "rows.jsonl", list(rows))), out=str(out), **source)
    return open_store(
        str(out), name="s", image_token_id=IMAGE, image_merge_size=MERGE, cache_dir=str(tmp_path / "cache")
    )


def test_placeholders_are_as_many_as_the_grid_says_and_never_targets(model_dir, tmp_path):
    image = {"type": "image", "base64": base64_of(picture())}
    store = encoded(model_dir, tmp_path, row({"type": "text", "text": "what"}, image, answer="yes"), row("hi"))
    with_image, text = store[0], store[1]
    expected = ImageReader(str(model_dir)).read([picture()])
    assert np.array_equal(with_image.images.pixel_values, expected.pixel_values)
    assert with_image.images.grid_thw.tolist() == expected.grid_thw.tolist()
    ids = with_image.input_ids.tolist()
    count = int(expected.grid_thw.prod()) // MERGE**2
    begin = ids.index(BEGIN)
    assert ids[begin : begin + count + 2] == [BEGIN, *[IMAGE] * count, END]
    assert ids.count(IMAGE) == count
    # "yes" and the end of the turn.
    assert with_image.loss_mask.sum() == 4
    assert not with_image.loss_mask[: begin + count + 2].any()
    assert text.images is None


@pytest.mark.parametrize(
    "part",
    [
        lambda folder: {"type": "image", "image": base64_of(picture())},
        lambda folder: {"type": "image", "path": str(folder / "p.png")},
        lambda folder: {"type": "image", "image": f"file://{folder / 'p.png'}"},
        lambda folder: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64_of(picture())}"}},
        lambda folder: {"type": "image", "image": {"bytes": None, "path": str(folder / "p.png")}},
    ],
)
def test_an_image_is_the_same_however_it_is_given(model_dir, tmp_path, part):
    picture().save(tmp_path / "p.png")
    store = encoded(model_dir, tmp_path, row(part(tmp_path), {"type": "text", "text": "what"}))
    expected = ImageReader(str(model_dir)).read([picture()])
    assert np.array_equal(store[0].images.pixel_values, expected.pixel_values)


def test_images_of_a_column_are_taken_in_order(model_dir, tmp_path):
    first, second = picture(1, (16, 16)), picture(2, (32, 16))
    there = {"type": "image"}
    store = encoded(model_dir, tmp_path, row(there, "and", there, images=[base64_of(first), base64_of(second)]))
    expected = ImageReader(str(model_dir)).read([first, second])
    assert store[0].images.grid_thw.tolist() == expected.grid_thw.tolist()
    assert np.array_equal(store[0].images.pixel_values, expected.pixel_values)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (row({"type": "image"}), "a part {type: image} without an image"),
        (row("look", images=["AAAA"]), "1 more images than parts"),
        (row({"type": "image", "image": "https://example.com/a.png"}), "is the address https://example.com/a.png"),
        (row({"type": "image", "image": "/nowhere/a.png"}), "there is no file /nowhere/a.png"),
        (row({"type": "image", "image": base64.b64encode(b"no image").decode()}), "image 0: cannot be read"),
        (row("a <|image_pad|> typed"), "0 images, and 1 placeholder tokens"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "image"}]}]},
            "an assistant turn with an image",
        ),
    ],
    ids=range(7),
)
def test_what_cannot_be_read_is_an_error_with_its_row(model_dir, tmp_path, made, said):
    with pytest.raises(DataError) as caught:
        encoded(model_dir, tmp_path, row("fine"), made)
    assert said in str(caught.value)
    assert "row 1" in str(caught.value)


def test_a_row_too_long_is_dropped_and_its_image_never_cut(model_dir, tmp_path):
    image = {"type": "image", "base64": base64_of(picture())}
    store = encoded(model_dir, tmp_path, row(image, "what is this?"), row("hi"), max_length=30)
    assert len(store) == 1
    assert store.report.dropped == {"image_too_long": 1}


def test_a_model_of_text_takes_no_image(model_dir):
    settings = TokenizerSettings(str(model_dir))
    from burnish.data.chat import ChatReader, Kind

    reader = ChatReader(Kind.CHAT, "messages", "tools", "system", nulls_are_padding=False)
    conversation = reader.read(row({"type": "image", "base64": base64_of(picture())}))
    assert not isinstance(conversation, Dropped)
    with pytest.raises(DataError, match="the model takes none"):
        settings.load().encode([conversation])


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_pictures_come_back_as_the_model_sees_them(model_dir, kind):
    reader = ImageReader(str(model_dir))
    sent = [picture(0, size=(24, 16)), picture(1, size=(8, 40)), picture(2, size=(90, 50))]
    images = reader.read(sent)
    assert images.grid_thw.tolist() == [[1, 4, 6], [1, 10, 2], [1, 4, 10]]
    found = list(reader.pictures(Images(images.pixel_values.astype(kind), images.grid_thw)))
    resized = [sent[0], sent[1], sent[2].resize((40, 16), Image.Resampling.BICUBIC)]
    for image, expected in zip(found, resized, strict=True):
        assert image.size == expected.size
        assert np.abs(np.asarray(image, int) - np.asarray(expected, int)).max() <= 1
    assert np.array_equal(np.asarray(found[0]), np.asarray(sent[0]))


def test_the_first_moment_is_shown_of_an_image_that_lasts(model_dir):
    reader = ImageReader(str(model_dir))
    first, second, last = (reader.read([picture(seed)]).pixel_values for seed in range(3))
    images = Images(np.concatenate([first, second, last]), np.array([[2, 4, 6], [1, 4, 6]]))
    found = [np.asarray(image) for image in reader.pictures(images)]
    assert [np.array_equal(image, np.asarray(picture(seed))) for image, seed in zip(found, (0, 2), strict=True)] == [
        True
    ] * 2
