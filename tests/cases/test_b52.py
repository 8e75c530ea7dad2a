"""B52: no row is lost, split or put where it does not fit."""

import pytest

from burnish import SFTConfig
from burnish.config import find_problems
from burnish.data.packing import Layout, plan_bins
from burnish.inspect.plan import check
from tests.toys import row, write_jsonl


@pytest.mark.parametrize(("lengths", "bins"), [([7] * 8, 8), ([8, 8, 1], 3), ([3, 5, 4, 4], 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_number_of_bins(lengths, bins, ranks):
    plans = plan_bins(lengths, capacity=8, layout=Layout(data_size=ranks))
    rows = [row for plan in plans for (row,) in plan if row]
    assert sorted(position for row in rows for position in row) == list(range(len(lengths)))
    assert max(sum(lengths[position] for position in row) for row in rows) <= 8
    if ranks == 1:
        assert len(rows) == bins
    assert {len(plan) for plan in plans} == {-(-bins // ranks)}


@pytest.fixture
def config_of(tmp_path, model_dir):
    rows = [row([4] * length, [0] + [1] * (length - 1)) for length in (9, 3, 5)]
    store = write_jsonl(tmp_path / "store.jsonl", rows)
    data = {"pretokenized_dataset_paths": [str(store)], "batch_size": 3}
    return lambda **keys: SFTConfig(model={"path": str(model_dir)}, **data, use_sequence_packing=True, **keys)


def test_a_row_longer_than_max_length_is_cut_as_it_is_without_packing(config_of):
    for config in (config_of(max_length=8), config_of(max_length=8).model_copy(update={"use_sequence_packing": False})):
        report = check(config)
        assert report.problems == ()
        assert report.plan.tokens_per_step == 8 + 3 + 5


@pytest.mark.parametrize(
    ("keys", "key", "found"),
    [
        ({"max_length": 8, "max_tokens_per_microbatch": 7}, "max_tokens_per_microbatch", "is less than max_length=8"),
        ({}, "use_sequence_packing", "needs max_length"),
        ({"max_tokens_per_microbatch": 8}, "use_sequence_packing", "needs max_length"),
    ],
)
def test_a_capacity_that_some_row_would_not_fit_is_refused(config_of, keys, key, found):
    assert [(p.key, found in p.message) for p in find_problems(config_of(**keys), environment={})] == [(key, True)]
