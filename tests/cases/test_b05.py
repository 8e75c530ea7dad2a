"""B05: truncation that leaves no target drops the row; sizes are those after the drop."""

import pytest

from burnish.data.mixture import Mixture
from burnish.data.samplers import RandomSampler
from burnish.data.store import open_store
from burnish.errors import DataError
from tests.toys import row, write_jsonl

LONG = row([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(("max_length", "targets"), [(7, 1), (8, 2), (9, 2), (None, 2)])
def test_kept(tmp_path, max_length, targets):
    store = open_store(write_jsonl(tmp_path / "a.jsonl", [LONG]), name="s", max_length=max_length)
    assert store.target_counts.tolist() == [targets]
    assert store.lengths.tolist() == [min(max_length or 8, 8)]


def test_dropped(tmp_path):
    with pytest.raises(DataError, match="1 of 1 rows dropped: 1 no_target"):
        open_store(write_jsonl(tmp_path / "a.jsonl", [LONG]), name="s", max_length=6)
    store = open_store(write_jsonl(tmp_path / "b.jsonl", [LONG, row([1, 2], [0, 1]), LONG]), name="s", max_length=6)
    assert (len(store), store.report.dropped) == (1, {"no_target": 2})
    assert len(RandomSampler(len(Mixture([store])), seed=1)) == 1
