"""B78: a DatasetDict or a hub snapshot where one data set is expected."""

import logging

import datasets
import pytest

from burnish.data.store import open_store
from burnish.errors import DataError
from tests.data.stores import contents
from tests.toys import row, write_parquet

ROWS = [row([1, 2], [0, 1]), row([3, 4], [1, 1])]


@pytest.fixture
def splits(tmp_path):
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=data, test=data).save_to_disk(tmp_path / "store")
    return tmp_path / "store"


def test_splits_are_named_and_one_of_them_works(splits):
    with pytest.raises(DataError, match=r"is a DatasetDict of the splits train, test.*\n  fix: .*store/train"):
        open_store(splits, name="s")
    assert contents(open_store(splits / "train", name="s")) == [([1, 2], [0, 1]), ([3, 4], [1, 1])]


def test_a_dict_whose_own_file_was_lost(splits):
    (splits / "dataset_dict.json").unlink()
    with pytest.raises(DataError, match="holds the save_to_disk data sets test, train"):
        open_store(splits, name="s")


def test_a_missing_data_file(tmp_path):
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "store", num_shards=2)
    (tmp_path / "store" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"names data-00001-of-00002\.arrow, which is not there"):
        open_store(tmp_path / "store", name="s")


def test_a_snapshot_is_joined_with_a_warning(tmp_path, caplog):
    for split in ("train", "test"):
        write_parquet(tmp_path / "store" / "data" / f"{split}-0.parquet", ROWS)
    (tmp_path / "store" / "README.md").write_text("a data set")
    with caplog.at_level(logging.WARNING):
        assert len(open_store(tmp_path / "store", name="s")) == 4
    assert "joins what look like splits: test (1 file), train (1 file)" in caplog.text
