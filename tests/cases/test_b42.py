"""B42: what mixing weights mean, and which are refused."""

import json
import logging
from itertools import islice

import numpy as np
import pytest

from burnish import SFTConfig
from burnish.assemble.data import build_sampler
from burnish.config import find_problems
from burnish.data.mixture import Mixture
from burnish.data.samplers import DataMixingSampler
from burnish.errors import ConfigError, DataError
from burnish.inspect.plan import check
from tests.config.configs import load
from tests.toys import row, write_jsonl
from tests.train.fakes import make_store

LENGTHS = [10, 1000]


def make(weights, *, lengths=LENGTHS, seed=42):
    return DataMixingSampler(range(sum(lengths)), lengths=lengths, weights=weights, seed=seed)


def draws(sampler, number):
    rows = []
    while len(rows) < number:
        rows += islice(iter(sampler), number - len(rows))
    return rows


def test_weights_are_relative():
    assert draws(make([8, 2]), 3000) == draws(make([0.8, 0.2]), 3000) == draws(make([0.4, 0.1]), 3000)


@pytest.mark.parametrize(("weights", "share"), [([1, 1], 0.5), ([8, 2], 0.8), ([0.3, 0.6], 1 / 3), ([1, 999], 0.001)])
def test_shares_over_ten_thousand_draws(weights, share):
    rows = np.array(draws(make(weights), 10_000))
    assert abs((rows < 10).mean() - share) <= 1e-4


def test_epochs_differ_and_seeds_decide():
    sampler = make([1, 1])
    first, second = list(sampler), list(sampler)
    assert len(first) == len(second) == 1010
    assert first != second
    assert first == list(make([1, 1])) != list(make([1, 1], seed=1))


@pytest.mark.parametrize("weights", [[0, 1], [-1, 2], [float("nan"), 1], [float("inf"), 1], [True, 1], ["1", 1]])
def test_numbers_that_are_no_weights(weights):
    with pytest.raises(DataError, match="is no number > 0"):
        make(weights)


@pytest.mark.parametrize("weights", [[1, 1, 1], [1], [], "[0.8,0.2]"])
def test_weights_that_do_not_fit_the_sources(weights):
    with pytest.raises(DataError, match="for 2 sources"):
        make(weights)


def test_a_source_without_rows_is_named():
    with pytest.raises(DataError, match="source 1: has no rows"):
        make([1, 1], lengths=[10, 0])


def test_lengths_that_are_not_the_rows():
    with pytest.raises(DataError, match=r"\[10, 5\] are not the 20 rows"):
        DataMixingSampler(range(20), lengths=[10, 5], weights=[1, 1])


def config(**keys):
    return SFTConfig(model={"path": "m"}, pretokenized_dataset_paths=["small", "large"], **keys)


@pytest.mark.parametrize("weights", [[0, 1], [-1, 2], [float("nan"), 1], ["a", 1]])
def test_a_config_with_such_weights_is_refused_before_any_data_is_looked_for(weights):
    with pytest.raises(ConfigError, match="train_dataset_weights"):
        config(train_dataset_weights=weights)


def test_weights_and_sources_are_counted_before_any_data_is_looked_for():
    (problem,) = find_problems(config(train_dataset_weights=[1, 1, 1]), environment={})
    assert (problem.key, problem.message) == ("train_dataset_weights", "has 3 entries for 2 training sources")


@pytest.mark.parametrize("text", ["[0.8,0.2]", "[0.8, 0.2]"])
def test_weights_as_text(text):
    assert load(f"train_dataset_weights={text}").train_dataset_weights == (0.8, 0.2)


def test_a_source_whose_every_row_drops_is_named(tmp_path, model_dir):
    stores = [write_jsonl(tmp_path / f"{n}.jsonl", [row([5, 6], [0, mask])]) for n, mask in (("full", 1), ("bare", 0))]
    keys = {"pretokenized_dataset_paths": [str(s) for s in stores], "train_dataset_weights": [1, 1]}
    report = check(SFTConfig(model={"path": str(model_dir)}, **keys))
    (problem,) = report.problems
    assert (problem.key, problem.value) == ("train data", str(stores[1]))
    assert "bare.jsonl" in report.to_text()
    assert "no_target" in problem.message


def test_without_weights_both_are_passed_once_and_the_log_says_so(caplog):
    mixture = Mixture([make_store(10), make_store(1000)])
    with caplog.at_level(logging.INFO, "burnish"):
        sampler = build_sampler(config(), mixture)
    assert caplog.messages == ["no weights: an epoch is one pass over all 1010 rows of 2 sources"]
    assert sorted(sampler) == list(range(1010))


def test_a_resumed_mix_goes_on():
    whole = draws(make([8, 2]), 3000)
    for at in (1, 999, 1010, 2020, 2500):
        first, again = make([8, 2]), make([8, 2])
        draws(first, at)
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert draws(again, 3000 - at) == whole[at:]
