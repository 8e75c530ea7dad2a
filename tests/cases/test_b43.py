"""B43: steps are ceil(rows / batch size) an epoch, with and without packing."""

from itertools import islice

import pytest

from burnish import SFTConfig
from burnish.config import find_problems
from burnish.errors import ConfigError
from burnish.inspect.plan import check
from tests.toys import row, write_jsonl
from tests.train.fakes import make_store, make_stream


@pytest.fixture
def config_of(tmp_path, model_dir):
    store = write_jsonl(tmp_path / "store.jsonl", [row([4, 5, 6 + i % 40], [0, 1, 1]) for i in range(41)])

    def make(**keys):
        size = {} if "batch_tokens" in keys else {"batch_size": 4}
        return SFTConfig(model={"path": str(model_dir)}, pretokenized_dataset_paths=[str(store)], **size, **keys)

    return make


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("steps", "expected"), [({}, 11), ({"num_epochs": 2}, 22), ({"num_steps": 1000}, 1000)])
def test_steps_of_41_rows_in_batches_of_4(config_of, packed, steps, expected):
    keys = {"use_sequence_packing": True, "max_length": 8} if packed else {}
    report = check(config_of(**steps, **keys))
    assert report.problems == ()
    assert (report.plan.steps_per_epoch, report.plan.num_steps) == (11, expected)


def test_both_given_is_an_error(config_of):
    assert "num_epochs" in str(find_problems(config_of(num_steps=7, num_epochs=1)))


def test_zero_steps_is_an_error(config_of):
    with pytest.raises(ConfigError, match="num_steps"):
        config_of(num_steps=0)


def test_more_steps_than_an_epoch_go_on_in_a_new_order():
    draws = list(islice(make_stream(make_store(41)).draws(), 1000))
    epochs = [draws[start : start + 11] for start in range(0, 990, 11)]
    orders = {tuple(row for draw in epoch for row in draw.rows) for epoch in epochs}
    assert len(orders) == 90
    assert all(sorted(order) == list(range(41)) for order in orders)
    assert all([len(draw.rows) for draw in epoch] == [4] * 10 + [1] for epoch in epochs)


def test_a_step_of_tokens_has_no_number_of_steps_an_epoch(config_of):
    report = check(config_of(batch_tokens=12, num_steps=30))
    assert (report.problems, report.plan.steps_per_epoch, report.plan.num_steps, report.plan.tokens_per_step) == (
        (),
        None,
        30,
        123 / 11,
    )
    shown = [" ".join(line.split()) for line in report.to_text().splitlines()]
    assert "steps 30; 2.73 epochs, 112 rows drawn" in shown
    assert "tokens 336; 11 a step" in shown
    assert report.to_json()["steps_per_epoch"] is None
