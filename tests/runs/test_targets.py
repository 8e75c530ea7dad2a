"""Targets end to end (B01, B05, B62): what is dropped, what is counted, and that the loss is of what is left."""

import json

import pytest

from burnish import SFTConfig, SFTTrainer
from burnish.errors import DataError
from tests.toys import chat, row, write_jsonl

B01 = [
    row([1, 2, 3], [1, 1, 1]),
    row([7, 8, 9], [1, 0, 0]),
    row([5], [1]),
    row([4, 5, 6], [1, 0, 1]),
    row([50, 74, 89, 20, 48], [0, 1, 1, 0, 1]),
]


@pytest.fixture
def train(tmp_path, model_dir):
    """Train one step on everything, or for as many steps as are asked for; the metrics lines."""

    def run(name="run", **keys):
        base = {"model": {"path": str(model_dir)}, "batch_size": 8, "num_steps": 1, "num_workers": 0}
        SFTTrainer(SFTConfig(log_dir=str(tmp_path / "runs"), run_name=name, **(base | keys))).train()
        return [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]

    return run


@pytest.mark.parametrize(("max_length", "targets"), [(8, 6), (2, 2)])
def test_packed_and_padded_count_the_same_targets_and_lose_the_same(tmp_path, train, max_length, targets):
    store = str(write_jsonl(tmp_path / "store.jsonl", B01))
    keys = {"pretokenized_dataset_paths": [store], "max_length": max_length}
    (padded,) = train("padded", remove_microbatch_padding=False, **keys)
    (in_row,) = train("in_row", **keys)
    (packed,) = train("packed", use_sequence_packing=True, **keys)
    assert {m["train/num_targets"] for m in (padded, in_row, packed)} == {targets}
    for metrics in (in_row, packed):
        assert metrics["train/loss"] == pytest.approx(padded["train/loss"], rel=1e-6)


@pytest.mark.parametrize(("max_length", "targets"), [(7, 1), (8, 2)])
def test_rows_that_keep_a_target_train_and_evaluate(tmp_path, train, max_length, targets):
    store = str(write_jsonl(tmp_path / "store.jsonl", [row([1, 2, 3, 4, 5, 6, 7, 8], [0] * 6 + [1, 1])]))
    data = {"pretokenized_dataset_paths": [store], "eval_pretokenized_dataset_paths": [store]}
    before, step = train(max_length=max_length, eval_before_train=True, **data)
    assert step["train/num_targets"] == before["eval/store.jsonl/num_targets"] == targets
    assert step["train/loss"] == pytest.approx(before["eval/store.jsonl/loss"], rel=1e-6)


@pytest.mark.parametrize("role", ["train", "eval"])
def test_data_without_a_target_left_is_an_error_with_totals(tmp_path, train, role):
    good = str(write_jsonl(tmp_path / "good.jsonl", B01))
    bad = str(write_jsonl(tmp_path / "bad.jsonl", [row([1, 2, 3], [1, 0, 0]), row([4, 5], [1, 0])]))
    keys = {"pretokenized_dataset_paths": [good]}
    if role == "train":
        keys["pretokenized_dataset_paths"] = [good, bad]
    else:
        keys["eval_pretokenized_dataset_paths"] = [bad]
    with pytest.raises(DataError, match=r"bad\.jsonl.*2 of 2 rows dropped: 2 no_target"):
        train(**keys)
    assert not list(tmp_path.rglob("metrics.jsonl")), "found before anything was started"


def test_a_prompt_that_fills_max_length_drops_its_chat_row(tmp_path, train):
    rows = [chat("x" * 200, "ok"), chat("short", "yes")]
    (step,) = train(train_datasets=[str(write_jsonl(tmp_path / "c.jsonl", rows))], max_length=64)
    assert step["train/num_targets"] == len("yes") + 1
    with pytest.raises(DataError, match="1 no_target"):
        train(train_datasets=[str(write_jsonl(tmp_path / "d.jsonl", rows[:1]))], max_length=64)


def test_each_source_has_a_loss_of_its_own(tmp_path, train):
    stores = [str(write_jsonl(tmp_path / f"{name}.jsonl", [B01[i]])) for name, i in (("a", 0), ("b", 4))]
    (both,) = train("both", pretokenized_dataset_paths=stores)
    alone = [train(name, pretokenized_dataset_paths=[s])[0]["train/loss"] for name, s in zip("ab", stores, strict=True)]
    assert both["train/loss/a.jsonl"] == pytest.approx(alone[0], rel=1e-6)
    assert both["train/loss/b.jsonl"] == pytest.approx(alone[1], rel=1e-6)
    assert both["train/loss"] == pytest.approx((2 * alone[0] + 3 * alone[1]) / 5, rel=1e-6)
