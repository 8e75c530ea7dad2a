"""B43: steps are ceil(rows / batch size) an epoch, with and without packing."""

import pytest

from burnish import SFTConfig
from burnish.config import find_problems
from burnish.errors import ConfigError
from burnish.inspect.plan import check
from tests.toys import row, write_jsonl


@pytest.fixture
def config_of(tmp_path, model_dir):
    store = write_jsonl(tmp_path / "store.jsonl", [row([4, 5, 6 + i % 40], [0, 1, 1]) for i in range(41)])

    def make(**keys):
        return SFTConfig(model={"path": str(model_dir)}, pretokenized_dataset_paths=[str(store)], batch_size=4, **keys)

    return make


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("steps", "expected"), [({}, 11), ({"num_epochs": 2}, 22), ({"num_steps": 1000}, 1000)])
def test_steps_of_41_rows_in_batches_of_4(config_of, packed, steps, expected):
    keys = {"use_sequence_packing": True, "max_length": 8} if packed else {}
    report = check(config_of(**steps, **keys))
    assert report.problems == ()
    assert (report.steps_per_epoch, report.num_steps) == (11, expected)


def test_both_given_is_an_error(config_of):
    assert "num_epochs" in str(find_problems(config_of(num_steps=7, num_epochs=1)))


def test_zero_steps_is_an_error(config_of):
    with pytest.raises(ConfigError, match="num_steps"):
        config_of(num_steps=0)
