"""B67: command-line values keep the type of their key."""

import pytest

from burnish.config import SFTConfig
from tests.config.configs import load, refused


@pytest.mark.parametrize("word", ["resume_from=", "resume_from=None", "resume_from=null"])
def test_resume_from_nothing_is_a_fresh_start(word):
    assert load(word).resume_from == ""


@pytest.mark.parametrize("word", ["max_length=None", "max_length=null", "max_length="])
def test_none_is_none_for_an_optional_key(word):
    assert load(word).max_length is None


def test_a_whole_number_may_have_an_exponent():
    steps = load("num_steps=1e3").num_steps
    assert (steps, type(steps)) == (1000, int)


def test_a_flag_is_true_or_false_and_nothing_else():
    assert load("force_recache=False").force_recache is False
    problem = refused("force_recache=2")["force_recache"]
    assert (problem.value, problem.fix) == ("2", "write force_recache=true or force_recache=false")


def test_names_stay_text():
    config = load("eval_pretokenized_dataset_paths=[a, b]", "eval_dataset_names=[on,010]", "run_name=007")
    assert config.eval_dataset_names == ("on", "010")
    assert config.run_name == "007"


def test_a_slice_of_times_stays_text():
    assert load("train_dataset_splits=[12:30]").train_dataset_splits == ("12:30",)


def test_a_path_is_whole():
    assert load("ckpt_path=gs://b/a #1").ckpt_path == "gs://b/a #1"
    assert load("model.path=s3://b/a #1").model.path == "s3://b/a #1"


def test_a_slice_in_brackets_is_one_item():
    assert load("train_dataset_splits=[train[:100]]").train_dataset_splits == ("train[:100]",)


def test_a_bare_path_is_a_list_of_one():
    assert load("train_datasets=", "pretokenized_dataset_paths=/x").pretokenized_dataset_paths == ("/x",)


def test_quotes_decide_whether_a_comma_parts():
    assert load("train_datasets=['/a, b']").train_datasets == ("/a, b",)
    assert load("train_datasets=[/a, b]").train_datasets == ("/a", "b")


def test_an_equals_sign_in_a_path_stays():
    assert load("train_datasets=['s3://b/k=v/x']").train_datasets == ("s3://b/k=v/x",)


def test_a_variable_is_not_expanded_so_that_no_such_path_is_found():
    assert load("train_datasets=['$HOME/data']").train_datasets == ("$HOME/data",)


def test_half_a_list_is_an_error_that_shows_the_spelling():
    problem = refused("train_datasets=['a', 'b'")["train_datasets"]
    assert "the closing ']' is missing" in problem.message
    assert problem.fix == "write ['a', 'b'] or [a, b]"


def test_python_values_are_read_alike():
    config = SFTConfig(model={"path": "m"}, train_datasets="d.jsonl", num_steps=1e3, max_length="512", run_name="007")
    assert config.train_datasets == ("d.jsonl",)
    assert (config.num_steps, config.max_length, config.run_name) == (1000, 512, "007")
