"""What every store of examples promises."""

import numpy as np
import pytest

from burnish.data.example import Example
from burnish.data.mixture import Mixture
from burnish.data.store import open_store
from tests.data.stores import KINDS, write_shard
from tests.toys import row
from tests.train.fakes import make_store

ROWS = [row(list(range(1, n + 1)), [n % 2, *[1] * (n - 1)]) for n in range(1, 8)]


@pytest.fixture(params=[*KINDS, "mixture of one", "mixture of two", "in memory"])
def store(request, tmp_path):
    kinds = {"mixture of one": ["parquet"], "mixture of two": ["jsonl", "arrow lz4"]}.get(
        request.param, [request.param]
    )
    if request.param == "in memory":
        return make_store(6)
    for kind in kinds:
        write_shard(tmp_path / kind, 0, ROWS, kind=kind, ids="int16")
    opened = [open_store(tmp_path / kind, name=kind, max_length=6) for kind in kinds]
    return Mixture(opened) if request.param.startswith("mixture") else opened[0]


def test_sizes_are_those_of_the_rows(store):
    assert len(store) == len(store.lengths) == len(store.target_counts) == len(store.num_patches)
    for index in range(len(store)):
        example = store[index]
        assert isinstance(example, Example)
        assert example.input_ids.shape == example.loss_mask.shape == (store.lengths[index],)
        assert store.target_counts[index] == example.loss_mask[1:].sum() > 0
        assert store.num_patches[index] == 0
        assert example.images is None


def test_types(store):
    for array in (store.lengths, store.target_counts, store.num_patches, store[0].input_ids):
        assert np.issubdtype(array.dtype, np.integer)
    assert store[0].loss_mask.dtype == np.uint8
    assert set(np.unique(store[len(store) - 1].loss_mask)) <= {0, 1}


def test_sizes_can_be_picked_by_row_numbers(store):
    rows = [len(store) - 1, 0]
    assert store.lengths[rows].tolist() == [len(store[r].input_ids) for r in rows]


def test_numpy_row_numbers_are_row_numbers(store):
    assert store[np.int64(1)].input_ids.tolist() == store[1].input_ids.tolist()


def test_rows_are_read_the_same_twice(store):
    assert [store[i].input_ids.tolist() for i in range(len(store))] == [
        store[i].input_ids.tolist() for i in range(len(store))
    ]


def test_ends(store):
    with pytest.raises(IndexError):
        store[len(store)]


def test_says_what_and_where_it_is(store):
    assert store.name
    assert isinstance(store.fingerprint, str)
    assert store.fingerprint
    places = [store.locate(i) for i in range(len(store))]
    assert len(set(places)) == len(store)
    assert all(", row " in place for place in places)
