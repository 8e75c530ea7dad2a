"""B35: a row with images is never cut, and its placeholders are those of its grid."""

import pytest

from burnish import load_from_pretokenized
from burnish.errors import DataError
from tests.data.images import PLACEHOLDER, image_row, text_row, write_images

KINDS = ["parquet", "jsonl", "arrow file", "arrow lz4"]


def load(folder, **how):
    return load_from_pretokenized(folder, image_token_id=PLACEHOLDER, image_merge_size=2, **how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_length", [8, 4])
def test_over_length_image_rows_are_dropped_and_text_rows_cut(tmp_path, kind, max_length):
    write_images(tmp_path / "s", [image_row(10), text_row(10)], kind=kind)
    store = load(tmp_path / "s", max_length=max_length)
    assert store.report.dropped == {"image_too_long": 1}
    assert (len(store), store.lengths.tolist(), store[0].images) == (1, [max_length], None)
    whole = load(tmp_path / "s", max_length=10)
    assert (whole.lengths.tolist(), whole.num_patches.tolist()) == ([10, 10], [16, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("placeholders", "found"), [(3, 3), (5, 5), (0, 0)])
def test_placeholders_that_are_not_the_grids_are_an_error(tmp_path, kind, placeholders, found):
    write_images(tmp_path / "s", [text_row(10), image_row(10, placeholders=placeholders)], kind=kind)
    with pytest.raises(DataError, match=rf"row 1: has {found} image placeholder tokens, .* stands for 4\n"):
        load(tmp_path / "s")
    assert len(load_from_pretokenized(tmp_path / "s")) == 2, "without the model's numbers nothing is counted"


def test_a_text_row_with_a_placeholder_is_an_error(tmp_path):
    row = text_row(10)
    row["input_ids"][3] = PLACEHOLDER
    write_images(tmp_path / "s", [row], kind="jsonl")
    with pytest.raises(DataError, match=r"row 0: has 1 image placeholder tokens, .* stands for 0"):
        load(tmp_path / "s")
