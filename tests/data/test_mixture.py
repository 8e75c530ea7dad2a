import numpy as np
import pytest

from burnish.data.mixture import Mixture
from burnish.data.store import open_store
from tests.data.stores import contents
from tests.toys import row, write_jsonl

A = [row([1, 2], [0, 1]), row([3, 4, 5], [0, 1, 1])]
B = [row([6, 7], [1, 1])]
C = [row([8, 9, 10, 11], [0, 0, 0, 1]), row([12], [1]), row([13, 14], [0, 1])]


@pytest.fixture
def stores(tmp_path):
    return [open_store(write_jsonl(tmp_path / f"{n}.jsonl", r), name=n) for n, r in (("a", A), ("b", B), ("c", C))]


def test_rows_run_through_the_stores(stores):
    mixture = Mixture(stores)
    assert contents(mixture) == [content for store in stores for content in contents(store)]
    assert len(mixture) == 5
    assert mixture.starts.tolist() == [0, 2, 3, 5]
    assert mixture.lengths.tolist() == [2, 3, 2, 4, 2]
    assert mixture.target_counts.tolist() == [1, 2, 1, 1, 1]
    assert mixture.num_patches.tolist() == [0] * 5
    assert mixture.source_of([4, 0, 2, 1, 3]).tolist() == [2, 0, 1, 0, 2]
    assert mixture.source_of(np.array([[0], [4]])).tolist() == [[0], [2]]
    assert mixture.locate(4).endswith("c.jsonl, row 2")
    for index in (5, -1):
        with pytest.raises(IndexError):
            mixture[index]


def test_fingerprint_is_of_the_stores_in_order(stores):
    prints = [Mixture(s).fingerprint for s in (stores, stores[::-1], stores[:2], stores)]
    assert len(set(prints)) == 3
    assert prints[0] == prints[3]


def test_one_store_keeps_its_mapped_arrays(stores):
    assert Mixture(stores[:1]).lengths is stores[0].lengths
