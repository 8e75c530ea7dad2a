"""Chat rows with images: what is read, where their tokens stand, and what is refused."""

import base64
import io
from functools import partial

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from burnish.data.chat import Dropped
from burnish.data.example import Images
from burnish.data.pictures import ImageReader
from burnish.data.store import open_store
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


def encoded(model_dir, tmp_path, *rows, dataset=None, num_workers=0, **settings):
    """The rows of the store that is made of ``rows``, or of ``dataset``."""
    source = {
        "split": None,
        "tokenizer_settings": TokenizerSettings(
            str(model_dir), image_token_id=IMAGE, image_merge_size=MERGE, **settings
        ),
        "messages_key": None,
        "tools_key": None,
        "system_key": None,
        "num_workers": num_workers,
        "cache_dir": str(tmp_path / "cache"),
        "force_recache": False,
        "disable_cache": False,
    }
    out = tmp_path / "stores" / str(len(list(tmp_path.glob("stores/*"))))
    path = dataset or write_jsonl(tmp_path / "rows.jsonl", list(rows))
    write_store(str(path), out=str(out), **source)
    return open_store(
        str(out),
        name="s",
        image_token_id=IMAGE,
        image_merge_size=MERGE,
        image_reader=partial(ImageReader, str(model_dir)),
        cache_dir=str(tmp_path / "cache"),
    )


def assert_same(store, other):
    assert len(store) == len(other) > 0
    for number in range(len(store)):
        one, two = store[number], other[number]
        assert np.array_equal(one.input_ids, two.input_ids)
        assert np.array_equal(one.loss_mask, two.loss_mask)
        assert (one.images is None) == (two.images is None)
        if one.images:
            assert np.array_equal(one.images.pixel_values, two.images.pixel_values)
            assert np.array_equal(one.images.grid_thw, two.images.grid_thw)


def files_in(store_folder):
    """Of all rows, the images that a store holds."""
    tables = [pa.ipc.open_file(str(file)).read_all() for file in sorted(store_folder.glob("*.arrow"))]
    assert all("pixel_values" not in table.column_names for table in tables)
    return [image for table in tables for row in table["images"].to_pylist() for image in row or ()]


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
        (
            row({"type": "image", "image": base64.b64encode(b"no image").decode()}),
            "image 0: is no picture, but the bytes b'no image'",
        ),
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


def test_rows_of_compressed_images_equal_rows_of_pixels(model_dir, tmp_path):
    (tmp_path / "pictures").mkdir()
    picture(3).save(tmp_path / "pictures" / "a.jpg")
    there = {"type": "image"}
    first, second = {"type": "image", "image": base64_of(picture(1))}, {"type": "image", "path": "pictures/a.jpg"}
    turns = [
        {"role": "user", "content": [first, second, {"type": "text", "text": "and"}]},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": ["more", there]},
        {"role": "assistant", "content": "two"},
    ]
    last = base64_of(picture(2, (32, 40)))
    rows = [row("hi"), {"messages": turns, "images": [last]}, row(there, image="pictures/a.jpg"), row(first)]
    for settings in ({}, {"train_on_what": "all_assistant_messages"}, {"max_length": 60}):
        pixels = encoded(model_dir, tmp_path, *rows, **settings)
        lazy = encoded(model_dir, tmp_path, *rows, compressed_images=True, **settings)
        assert_same(lazy, pixels)
        assert lazy.report == pixels.report
        assert lazy.num_patches.tolist() == pixels.num_patches.tolist()
    assert pixels.report.dropped == {"image_too_long": 1}
    jpeg = (tmp_path / "pictures" / "a.jpg").read_bytes()
    pngs = [as_bytes(picture(1)), base64.b64decode(last)]
    assert files_in(tmp_path / "stores" / "1") == [pngs[0], jpeg, pngs[1], jpeg, pngs[0]]


def test_relative_paths_begin_in_the_folder_of_the_dataset(model_dir, tmp_path, monkeypatch):
    for name, seed in (("one", 1), ("two", 2), ("here", 3)):
        (tmp_path / name).mkdir()
        picture(seed).save(tmp_path / name / "a.png")
        write_jsonl(tmp_path / name / "rows.jsonl", [row({"type": "image", "image": "a.png"})])
    monkeypatch.chdir(tmp_path / "here")
    for seed, dataset in ((1, tmp_path / "one" / "rows.jsonl"), (2, tmp_path / "two"), (3, "rows.jsonl")):
        store = encoded(model_dir, tmp_path, dataset=dataset)
        assert np.array_equal(
            store[0].images.pixel_values, ImageReader(str(model_dir)).read([picture(seed)]).pixel_values
        )


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk"])
@pytest.mark.parametrize("lazy", [False, True])
def test_images_as_datasets_keeps_them(model_dir, tmp_path, kind, lazy):
    datasets.disable_progress_bars()
    jpeg, picture_file = as_bytes(picture(1), "JPEG"), tmp_path / "b.png"
    picture(2).save(picture_file)
    part = {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": datasets.Image()}
    features = datasets.Features(
        {
            "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.List(part)}),
            "images": datasets.List(datasets.Image()),
        }
    )
    text, there = {"type": "text", "text": "see", "image": None}, {"type": "image", "text": None, "image": None}
    inside = there | {"image": {"bytes": jpeg, "path": None}}
    answer = {"role": "assistant", "content": [text]}
    rows = [
        {"messages": [{"role": "user", "content": [text, inside]}, answer], "images": None},
        {
            "messages": [{"role": "user", "content": [there, text, there]}, answer],
            "images": [str(picture_file), picture(3)],
        },
        {"messages": [{"role": "user", "content": [text]}, answer], "images": []},
    ]
    made = datasets.Dataset.from_list(rows, features=features)
    place = tmp_path / ("d.parquet" if kind == "parquet" else "d")
    made.to_parquet(place) if kind == "parquet" else made.save_to_disk(place)
    store = encoded(model_dir, tmp_path, dataset=place, compressed_images=lazy)
    reader = ImageReader(str(model_dir))
    assert np.array_equal(store[0].images.pixel_values, reader.read([jpeg]).pixel_values)
    assert np.array_equal(store[1].images.pixel_values, reader.read([picture(2), picture(3)]).pixel_values)
    assert store[2].images is None
    if lazy:
        assert files_in(tmp_path / "stores" / "0")[:2] == [jpeg, picture_file.read_bytes()]


@pytest.mark.parametrize("lazy", [False, True])
def test_processes_write_the_bytes_that_one_writes(model_dir, tmp_path, lazy):
    def image(number):
        return {"type": "image", "image": base64_of(picture(number, (8 + number % 9, 12)))}

    rows = [row(f"look {number}", image(number)) if number % 25 == 0 else row(f"{number}") for number in range(600)]
    for workers in (0, 2):
        encoded(model_dir, tmp_path, *rows, num_workers=workers, compressed_images=lazy)
    stores = [sorted((tmp_path / "stores" / name).iterdir()) for name in "01"]
    assert [file.name for file in stores[0]] == [file.name for file in stores[1]]
    assert len(stores[0]) == 3
    assert [file.read_bytes() for file in stores[0]] == [file.read_bytes() for file in stores[1]]


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
