"""Stores of compressed images: read with the model's processor, bit for bit what a store of pixels holds."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from burnish import load_from_pretokenized
from burnish.data.images import IMAGE_TYPES
from burnish.data.pictures import ImageReader
from burnish.data.store import open_store
from burnish.errors import DataError
from tests.data.images import PLACEHOLDER, text_row
from tests.data.stores import write_arrow

MERGE = 2
FORMATS = ["parquet", "jsonl", "arrow file", "arrow stream", "packed arrow"]


def save_processor(folder, *, max_pixels=1024):
    sizes = {"patch_size": 4, "merge_size": MERGE, "temporal_patch_size": 2}
    Qwen2VLImageProcessorPil(**sizes, min_pixels=64, max_pixels=max_pixels).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return save_processor(tmp_path_factory.mktemp("processor"))


def picture(seed, size=(24, 16), kind="PNG"):
    pixels = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def image_row(processor, *files):
    """A row with as many placeholders as the files stand for."""
    grid = ImageReader(processor).read(files).grid_thw
    row = text_row(40)
    row["input_ids"][2 : 2 + int(grid.prod(1).sum()) // MERGE**2] = [PLACEHOLDER] * (
        int(grid.prod(1).sum()) // MERGE**2
    )
    return row | {"images": list(files), "image_grid_thw": grid.tolist()}


def write(folder, rows, *, kind, number=0):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"part-{number:03d}.{'arrow' if 'arrow' in kind else kind}"
    if kind == "jsonl":
        texts = [
            row | {"images": [base64.b64encode(one).decode() for one in row["images"]]} if row.get("images") else row
            for row in rows
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in texts))
        return
    columns = {name: pa.array([row[name] for row in rows]) for name in ("input_ids", "loss_mask")}
    columns |= {
        name: pa.array([row.get(name) for row in rows], IMAGE_TYPES[name])
        for name in ("pixel_values", "images", "image_grid_thw")
        if any(name in row for row in rows)
    }
    table = pa.table(columns)
    if kind == "parquet":
        pq.write_table(table, file, row_group_size=2)
    elif kind == "packed arrow":
        with pa.ipc.new_file(str(file), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        write_arrow(file, table, kind=kind, chunk=2)


def opened(folder, processor, **options):
    options |= {"image_token_id": PLACEHOLDER, "image_merge_size": MERGE}
    return load_from_pretokenized(folder, image_processor=processor, **options)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_pixels_of_the_processor(tmp_path, processor, kind):
    first, second = picture(0), picture(1, (16, 32), "JPEG")
    rows = [text_row(5), image_row(processor, first), image_row(processor, second, first), text_row(4)]
    rows[3] |= {"images": [], "image_grid_thw": None}
    write(tmp_path / "s", rows, kind=kind)
    write(tmp_path / "s", [text_row(6), image_row(processor, second)], kind=kind, number=1)
    store = opened(tmp_path / "s", processor)
    reader = ImageReader(processor)
    for number, files in {1: [first], 2: [second, first], 5: [second]}.items():
        wanted = reader.read(files)
        assert np.array_equal(store[number].images.pixel_values, wanted.pixel_values)
        assert np.array_equal(store[number].images.grid_thw, wanted.grid_thw)
        assert store.num_patches[number] == len(wanted.pixel_values)
    assert [store[number].images for number in (0, 3, 4)] == [None] * 3


def test_formats_are_one_store_and_other_bytes_are_another(tmp_path, processor):
    prints = set()
    for kind in FORMATS:
        write(tmp_path / kind, [text_row(5), image_row(processor, picture(0))], kind=kind)
        prints.add(opened(tmp_path / kind, processor).fingerprint)
    assert len(prints) == 1
    write(tmp_path / "other", [text_row(5), image_row(processor, picture(1))], kind="parquet")
    assert opened(tmp_path / "other", processor).fingerprint not in prints


def test_compressed_images_are_not_copied_out_of_an_arrow_file(tmp_path, processor):
    write(tmp_path / "s", [image_row(processor, picture(0))] * 3, kind="arrow file")
    opened(tmp_path / "s", processor, cache_dir=str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_threads_read_what_one_reads(tmp_path, processor):
    write(tmp_path / "s", [image_row(processor, picture(i, (8 + i, 20))) for i in range(12)], kind="arrow file")
    store = opened(tmp_path / "s", processor)
    alone = [store[i].images.pixel_values for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: store[i].images.pixel_values, [*range(12)] * 5))
    assert all(np.array_equal(found, alone[i % 12]) for i, found in enumerate(together))


def test_too_long_rows_are_dropped_and_counted(tmp_path, processor):
    write(tmp_path / "s", [image_row(processor, picture(0)), text_row(50)], kind="parquet")
    store = opened(tmp_path / "s", processor, max_length=30)
    assert store.report.dropped == {"image_too_long": 1}
    assert store.lengths.tolist() == [30]


FAULTS = {
    "no grid": (lambda r: r.pop("image_grid_thw"), "has images and no image_grid_thw"),
    "no images": (lambda r: r.pop("images"), "has image_grid_thw and no pixel_values or images"),
    "both": (lambda r: r.update(pixel_values=[[0.5]] * 24), "has pixel_values and images"),
    "fewer": (lambda r: r.update(image_grid_thw=r["image_grid_thw"] * 2), "images holds 1, image_grid_thw 2"),
    "an empty one": (lambda r: r.update(images=[b""]), "images is "),
    "a grid too large": (lambda r: r.update(image_grid_thw=[[2**30, 2, 1]]), "image_grid_thw is "),
    "other placeholders": (lambda r: r["input_ids"].__setitem__(30, PLACEHOLDER), "image placeholder tokens"),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_named_on_opening(tmp_path, processor, kind, fault):
    row = image_row(processor, picture(0))
    change, said = FAULTS[fault]
    change(row)
    write(tmp_path / "s", [text_row(5), image_row(processor, picture(0))], kind=kind)
    write(tmp_path / "s", [text_row(5), row], kind=kind, number=1)
    with pytest.raises(DataError, match=rf"part-001\.\w+, row 1: .*{said}"):
        opened(tmp_path / "s", processor)


@pytest.mark.parametrize("images", ["text", ["no base64!"], [3], {"a": 1}, [[1]]])
def test_json_that_is_no_list_of_base64(tmp_path, images):
    row = text_row(9) | {"images": images, "image_grid_thw": [[1, 2, 2]]}
    (tmp_path / "s.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"s\.jsonl, row 0: images is .*\n  fix: store images as the bytes"):
        load_from_pretokenized(tmp_path / "s.jsonl")


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.string()), pa.list_(pa.int64())])
def test_images_of_another_type(tmp_path, kind):
    table = pa.table({name: [[1, 2]] for name in ("input_ids", "loss_mask")} | {"image_grid_thw": [[[1, 2, 2]]]})
    table = table.set_column(1, "loss_mask", pa.array([[0, 1]]))
    value = {"string": "x", "list<item: string>": ["x"], "list<item: int64>": [1]}[str(kind)]
    pq.write_table(table.append_column("images", pa.array([value], kind)), tmp_path / "s.parquet")
    with pytest.raises(DataError, match=r"s\.parquet, row 0: images is "):
        load_from_pretokenized(tmp_path / "s.parquet")


def test_another_processor_is_named_with_the_row(tmp_path, processor):
    rows = [text_row(5), image_row(processor, picture(0, (8, 8))), image_row(processor, picture(0, (40, 40)))]
    write(tmp_path / "s", rows, kind="parquet")
    other = save_processor(tmp_path / "other", max_pixels=256)
    with pytest.raises(DataError, match=r"part-000\.parquet, row 2: its images become the grid \[\[1, 4, 4\]\], not"):
        opened(tmp_path / "s", other)


def test_a_broken_image_is_named_with_its_row(tmp_path, processor):
    row = image_row(processor, picture(0, kind="JPEG"))
    row["images"] = [row["images"][0][:-30]]
    write(tmp_path / "s", [text_row(5), row, image_row(processor, picture(0, (40, 40)))], kind="parquet")
    store = opened(tmp_path / "s", processor)
    with pytest.raises(DataError, match=r"part-000\.parquet, row 1, image 0: cannot be read: .*truncated"):
        _ = store[1]


def test_without_a_processor(tmp_path, processor):
    write(tmp_path / "s", [text_row(5), image_row(processor, picture(0))], kind="parquet")
    with pytest.raises(DataError, match=r"holds compressed images\n  fix: give image_processor"):
        load_from_pretokenized(tmp_path / "s")
    assert open_store(tmp_path / "s", name="s").num_patches.tolist() == [0, 24], "statistics need none"


def test_the_processor_is_made_only_for_rows_that_need_it(tmp_path):
    write(tmp_path / "s", [text_row(5) | {"images": None, "image_grid_thw": None}], kind="parquet")
    assert open_store(tmp_path / "s", name="s", image_reader=partial(pytest.fail, "made"))[0].images is None


def test_a_column_of_nulls_hides_nothing_of_the_others(tmp_path):
    table = pa.table({"images": pa.nulls(1), "input_ids": [[4, 5, 6]], "loss_mask": [[0, 1, 1]]})
    with pa.ipc.new_file(
        str(tmp_path / "s.arrow"), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as w:
        w.write_table(table)
    assert load_from_pretokenized(tmp_path / "s.arrow")[0].input_ids.tolist() == [4, 5, 6]
