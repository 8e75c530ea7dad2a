"""B37: null, empty and absent image columns are a text row; one of the two alone is an error."""

import numpy as np
import pytest

from burnish import load_from_pretokenized
from burnish.cli.main import main
from burnish.errors import DataError
from tests.data.images import image_row, pixels, text_row, write_images

NONE = {"null": None, "empty": []}


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "arrow file", "arrow stream"])
@pytest.mark.parametrize("none", [*NONE, "absent"])
def test_rows_with_and_without_images_in_one_store(tmp_path, kind, none):
    text = text_row(5) | ({} if none == "absent" else {"pixel_values": NONE[none], "image_grid_thw": NONE[none]})
    write_images(tmp_path / "s", [text, image_row(10), text, image_row(12, grid=[[1, 2, 2], [1, 4, 2]])], kind=kind)
    write_images(tmp_path / "s", [text_row(6)], kind=kind, number=1)
    store = load_from_pretokenized(tmp_path / "s")
    assert store.num_patches.tolist() == [0, 16, 0, 12, 0]
    assert [store[i].images is None for i in range(5)] == [True, False, True, False, True]
    assert store[3].images.grid_thw.tolist() == [[1, 2, 2], [1, 4, 2]]
    assert np.array_equal(store[1].images.pixel_values, np.float32(pixels(16)))
    assert np.array_equal(store[3].images.pixel_values, np.float32(pixels(12)))
    again = load_from_pretokenized(tmp_path / "s")
    assert again.fingerprint == store.fingerprint
    assert np.array_equal(again[3].images.pixel_values, store[3].images.pixel_values)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "arrow file"])
@pytest.mark.parametrize(("have", "lack"), [("pixel_values", "image_grid_thw"), ("image_grid_thw", "pixel_values")])
def test_one_of_the_pair_alone(tmp_path, kind, have, lack):
    row = image_row(10)
    row[lack] = None
    write_images(tmp_path / "s", [text_row(5), image_row(10)], kind=kind)
    write_images(tmp_path / "s", [text_row(5), row], kind=kind, number=1)
    with pytest.raises(DataError, match=rf"part-001\.\w+, row 1: has {have} and no {lack}"):
        load_from_pretokenized(tmp_path / "s")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_grid_thw": [[1, 4, 5]]}, r"pixel_values has 16 patches, image_grid_thw \[\[1, 4, 5\]\] has 20"),
        ({"image_grid_thw": [[3, 6148914691236517206, 1]]}, "pixel_values has 16 patches, .* has 18446744073709551618"),
        ({"image_grid_thw": [[1, 16]]}, r"image_grid_thw is \[\[1, 16\]\]"),
        ({"image_grid_thw": [[1, -4, -4]]}, r"image_grid_thw is \[\[1, -4, -4\]\]"),
        ({"pixel_values": [[0.5, 1.0]] * 15 + [[0.5]]}, "pixel_values is"),
        ({"pixel_values": [[0.5, float("nan")]] * 16}, "pixel_values holds a number that is not finite"),
        ({"pixel_values": [["a", "b"]] * 16}, "pixel_values is"),
        ({"pixel_values": [[]] * 16}, "pixel_values is"),
    ],
)
def test_images_that_do_not_fit(tmp_path, kind, change, said):
    write_images(tmp_path / "s", [image_row(10) | change], kind=kind)
    with pytest.raises(DataError, match=f"row 0: {said}"):
        load_from_pretokenized(tmp_path / "s")


def test_float_widths_and_formats_are_one_store(tmp_path):
    kinds = [("parquet", "halffloat"), ("arrow file", "float"), ("arrow stream", "double"), ("jsonl", "float")]
    prints = set()
    for kind, width in kinds:
        write_images(tmp_path / width / kind, [text_row(5), image_row(10)], kind=kind, floats=width)
        prints.add(load_from_pretokenized(tmp_path / width / kind).fingerprint)
    assert len(prints) == 1
    write_images(tmp_path / "other", [text_row(5), image_row(10, start=1)], kind="jsonl")
    assert load_from_pretokenized(tmp_path / "other").fingerprint not in prints


def test_a_model_of_text_refuses_image_rows_before_training(model_dir, tmp_path, capsys):
    write_images(tmp_path / "s", [text_row(5), image_row(10)], kind="parquet")
    keys = [f"model.path={model_dir}", f"pretokenized_dataset_paths={tmp_path / 's'}", "num_steps=1"]
    assert main(["check", *keys]) == 2
    assert "part-000.parquet, row 1: has images, and" in capsys.readouterr().err
