"""B69: every eval set has a name of its own."""

import pytest

from tests.config.configs import WORDS, broken, load


def _names(*words):
    return [source.name for source in load(*words).eval_sources]


def _messages(*words):
    return broken(*words, base=WORDS).get("eval_dataset_names", "")


def test_equal_last_parts_collide_and_both_paths_are_shown():
    found = _messages("eval_pretokenized_dataset_paths=[/a/val, /b/val]")
    assert found == "2 eval sets have the name 'val': /a/val and /b/val"


def test_the_last_part_is_the_name():
    assert _names("eval_pretokenized_dataset_paths=[/a/val/, /a/val2]") == ["val", "val2"]
    assert _names("eval_datasets=[/a/val/, /a/val2]") == ["val", "val2"]
    assert _messages("eval_pretokenized_dataset_paths=[/a/val/, /a/val2]") == ""


def test_the_extension_is_kept():
    assert _names("eval_datasets=s3://x/val.parquet") == ["val.parquet"]
    assert _names("eval_datasets=data/val.jsonl") == ["val.jsonl"]


def test_a_hub_id_is_the_name():
    assert _names("eval_datasets=[org/data, squad, ./org/data]") == ["org_data", "squad", "data"]


def test_equal_given_names_collide():
    found = _messages("eval_pretokenized_dataset_paths=[/a/x, /b/y]", 'eval_dataset_names=["a","a"]')
    assert found == "2 eval sets have the name 'a': /a/x and /b/y"


def test_one_dataset_with_two_splits_collides_unless_named():
    words = ("eval_datasets=[d, d]", "eval_dataset_splits=[test, validation]")
    assert _messages(*words) == "2 eval sets have the name 'd': d (test) and d (validation)"
    assert _messages(*words, "eval_dataset_names=[t, v]") == ""


@pytest.mark.parametrize("name", ["a/b", "a b", "", "..", "ä", "a\n"])
def test_odd_names_are_refused(name):
    words = ("eval_pretokenized_dataset_paths=[/a/x, /b/y]", f"eval_dataset_names=['{name}', y]")
    assert _messages(*words) == f"{name!r} cannot name the eval set /a/x"


def test_odd_default_names_are_cleaned():
    assert _names("eval_pretokenized_dataset_paths=['/a/my val #1']") == ["my_val__1"]


def test_loss_is_a_name_like_any_other():
    words = ("eval_pretokenized_dataset_paths=/a/x", "eval_dataset_names=loss")
    assert _names(*words) == ["loss"]
    assert _messages(*words) == ""


def test_datasets_come_before_stores():
    sources = load("eval_pretokenized_dataset_paths=/s", "eval_datasets=d", "eval_dataset_names=[x, y]").eval_sources
    assert [(s.name, s.path, s.split, s.pretokenized) for s in sources] == [
        ("x", "d", None, False),
        ("y", "/s", None, True),
    ]
