"""B68: misspelt and clashing keys are errors that name the way out."""

import logging

import pytest

from burnish.config import SFTConfig, load_config
from burnish.errors import ConfigError
from tests.config.configs import WORDS, broken, load, refused

_MODEL = ("model.path=m",)


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("num_step=5", "num_steps"),
        ("pretokenized_dataset_path=['/a']", "pretokenized_dataset_paths"),
        ("optimizer_config.leraning_rate=1", "optimizer_config.lr"),
        ("lr=1", "optimizer_config.lr"),
        ("megatron_config.tensor_parallel_size=1", "megatron_config.tensor_model_parallel_size"),
        ("max_seq_length=5", "max_length"),
    ],
)
def test_an_unknown_key_names_the_nearest(word, near):
    key = word.partition("=")[0]
    problem = refused(word)[key]
    assert problem.message == "there is no such key"
    assert problem.fix == f"write {near}, the nearest key there is"


def test_an_unknown_section_names_the_nearest():
    problem = refused("optimiser_config.lr=1")["optimiser_config"]
    assert problem.fix == "write optimizer_config, the nearest key there is"


def test_python_keys_are_checked_too():
    with pytest.raises(ConfigError) as error:
        SFTConfig(model={"path": "m", "dtyp": "float32"}, num_step=5)
    assert {problem.key for problem in error.value.problems} == {"model.dtyp", "num_step"}


def test_raw_data_and_stores_clash():
    assert "train_datasets" in broken("pretokenized_dataset_paths=/a")


def test_splits_and_stores_clash():
    found = broken("pretokenized_dataset_paths=/a", "train_dataset_splits=['train[:100]']", base=_MODEL)
    assert set(found) == {"train_dataset_splits"}


@pytest.mark.parametrize("word", ["eval_interval=5", "eval_before_train=true"])
def test_evaluating_needs_eval_data(word):
    assert broken(word) == {word.partition("=")[0]: "there is no eval set"}
    assert broken(word, "eval_datasets=e.jsonl") == {}


def test_names_are_as_many_as_eval_sets():
    found = broken("eval_datasets=[a.jsonl, b.jsonl]", "eval_pretokenized_dataset_paths=c", "eval_dataset_names=[x]")
    assert found == {"eval_dataset_names": "has 1 entries for 3 eval sets"}


def test_a_seed_that_is_text_is_refused():
    sampler = ("sampler=custom", "sampler_class_path=my.Sampler")
    assert broken(*sampler, "sampler_kwargs={seed: '42'}") == {"sampler_kwargs.seed": "is not a whole number"}
    assert broken(*sampler, "sampler_kwargs.seed=abc") == {"sampler_kwargs.seed": "is not a whole number"}
    assert broken(*sampler, "sampler_kwargs={seed: 42}") == {}
    assert load(*sampler, "sampler_kwargs.seed=42").sampler_kwargs == {"seed": 42}


def test_the_last_of_a_key_on_the_command_line_counts_with_a_notice(caplog):
    with caplog.at_level(logging.WARNING, logger="burnish.config.read"):
        assert load("num_steps=5", "num_steps=20").num_steps == 20
    assert [record.getMessage() for record in caplog.records] == [
        "num_steps is given twice; the last one counts: num_steps=20"
    ]


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("num_steps: 5\nnum_steps: 6\n", "num_steps", 2),
        ("model:\n  path: a\n  dtype: float32\n  path: b\n", "model.path", 4),
        ("model: {path: a}\nmodel.path: b\n", "model.path", 2),
        ("model: {path: a}\nmodel: {dtype: float32}\n", "model", 2),
        ("chat_template_kwargs: {a: 1, a: 1}\n", "chat_template_kwargs.a", 1),
    ],
)
def test_a_key_given_twice_in_yaml_is_an_error(tmp_path, text, key, line):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(file, WORDS)
    assert [problem.key for problem in error.value.problems] == [key]
    assert f"line {line}" in error.value.problems[0].message


def test_the_effective_config_is_shown():
    text = load("run_name=007").to_yaml()
    assert 'run_name: "007"\n' in text
    assert "\n# optimizer_config.lr: 1e-05\n" in text
