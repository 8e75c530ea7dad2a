"""Several ranks train as one does, whatever they share, and go on as any other number of them."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest

from burnish.assemble.model import plan_layout
from burnish.data.batch import IGNORE
from burnish.data.stream import BatchBuilder
from tests.parity import reference
from tests.parity.runs import (
    LR,
    ROWS,
    assert_equal,
    batches,
    batches_of_tokens,
    raw_data,
    read_back,
    run_on,
    store_data,
    train_as_rank,
)
from tests.parity.test_resume import assert_same_bits
from tests.ranks import on_ranks

STEPS = 5
IN_A_ROW, PADDED = {"micro_train_batch_size_per_gpu": 4}, {"remove_microbatch_padding": False}
BINS = {"use_sequence_packing": True, "max_tokens_per_microbatch": 200}
SHARED, COPIES = {"sequence_parallel_size": 2}, {"fsdp_config": {"fsdp_size": 2}}
SHAPES = {
    "in a row": (2, IN_A_ROW),
    "padded, offloaded": (2, {**PADDED, "fsdp_config": {"cpu_offload": True}}),
    "bins, recomputed": (2, {**BINS, "fsdp_config": {"activation_checkpointing": True}}),
    "shared rows, padded": (2, {**SHARED, **PADDED}),
    "shared bins": (2, {**SHARED, **BINS, "dataloader_num_workers": 2}),
    "shared rows, two copies": (4, {**SHARED, **COPIES, **IN_A_ROW}),
    "rows shared by four": (4, {"sequence_parallel_size": 4, **BINS}),
}


@pytest.fixture(scope="module")
def expected(model_dir):
    losses, norms, weights = reference.train(model_dir, batches(STEPS), lr=LR)
    return {"losses": losses, "norms": norms, "weights": weights}


@pytest.mark.parametrize("shape", SHAPES)
def test_stored_rows(tmp_path, model_dir, expected, shape):
    number, keys = SHAPES[shape]
    assert_equal(
        run_on(number, tmp_path, model_dir=model_dir, num_steps=STEPS, **store_data(tmp_path), **keys), expected
    )


def test_chat_rows(tmp_path, model_dir, expected):
    assert_equal(run_on(2, tmp_path, model_dir=model_dir, num_steps=STEPS, **raw_data(tmp_path)), expected)


def test_steps_of_tokens(tmp_path, model_dir):
    losses, norms, weights = reference.train(model_dir, batches_of_tokens(STEPS, 240), lr=LR)
    keys = {**SHARED, **store_data(tmp_path)}
    got = run_on(2, tmp_path, model_dir=model_dir, num_steps=STEPS, batch_tokens=240, **keys)
    assert_equal(got, {"losses": losses, "norms": norms, "weights": weights})


@pytest.mark.parametrize(("number", "keys"), [(2, SHARED), (3, PADDED), (4, BINS)], ids=str)
def test_other_objectives_and_an_evaluation(tmp_path, model_dir, number, keys):
    """The evaluation is the plain mean over the targets of all rows, before the first step."""
    objective = {"label_smoothing": 0.2, "z_loss": 0.1}
    losses, norms, weights = reference.train(model_dir, batches(STEPS), lr=LR, **objective)
    (mean,), _, _ = reference.train(model_dir, [ROWS], lr=0.0)
    data = store_data(tmp_path)
    keys = {**keys, **objective, "eval_before_train": True}
    keys["eval_pretokenized_dataset_paths"] = data["pretokenized_dataset_paths"]
    got = run_on(number, tmp_path, model_dir=model_dir, num_steps=STEPS, **data, **keys)
    assert_equal(got, {"losses": losses, "norms": norms, "weights": weights})
    first = json.loads((tmp_path / "runs" / "sft" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0
    assert first["eval/store.jsonl/loss"] == pytest.approx(mean, rel=1e-5)
    assert first["eval/store.jsonl/num_targets"] == sum(sum(mask[1:]) for _, mask in ROWS)


def stopped(step):
    return {"callbacks": [{"tests.parity.test_resume.StopAt": {"step": step}}]}


@pytest.mark.parametrize(("number", "keys"), [(2, BINS), (4, {**SHARED, **COPIES})], ids=str)
def test_ten_steps_are_five_and_five_to_the_bit(tmp_path, model_dir, number, keys):
    keys = {"sampler": "random", **store_data(tmp_path), **keys}
    whole = run_on(number, tmp_path / "whole", model_dir=model_dir, num_steps=10, **keys)
    first = on_ranks(number, train_as_rank, tmp_path / "parts", model_dir, 10, keys | stopped(5))[0]
    parts = run_on(number, tmp_path / "parts", model_dir=model_dir, num_steps=10, resume_from="latest", **keys)
    assert_same_bits(parts, whole)
    assert first + parts["rows"] == whole["rows"]


CHAIN = (
    (4, 2, {**SHARED, **IN_A_ROW}),
    (2, 4, {"micro_train_batch_size_per_gpu": 1, "dataloader_num_workers": 2}),
    (1, 6, {**IN_A_ROW, "dataloader_num_workers": 1}),
    (3, 8, PADDED),
    (4, 10, {**COPIES, **BINS}),
)
"""Ranks, the step they train to, and how."""


def test_a_run_goes_on_with_other_ranks(tmp_path, model_dir):
    keys = {"sampler": "random", **store_data(tmp_path)}
    whole = run_on(1, tmp_path / "whole", model_dir=model_dir, num_steps=10, **keys)
    rows = []
    for number, stop, shape in CHAIN:
        own = {**keys, **shape, **stopped(stop), "resume_from": "latest" if rows else ""}
        rows += on_ranks(number, train_as_rank, tmp_path / "chain", model_dir, 10, own)[0]
    assert rows == whole["rows"]
    chain = read_back(tmp_path / "chain", num_steps=10)
    assert chain["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert_equal(chain, whole)


def rows_read_twice(*arguments):
    """Every rank takes the part of the first."""

    def first(config, **ranks):
        return replace(plan_layout(config, **ranks), data_rank=0)

    with patch("burnish.assemble.run.plan_layout", first):
        return train_as_rank(*arguments)


def loss_per_rank(*arguments):
    """The mean of the ranks' means: targets of ranks with few of them weigh too much."""
    build = BatchBuilder.build

    def averaged(self, draw):
        made = build(self, draw)
        own = sum(int((m.labels != IGNORE).sum()) for m in made.micro_batches)
        return replace(made, num_targets=2 * max(1, own))

    with patch.object(BatchBuilder, "build", averaged):
        return train_as_rank(*arguments)


@pytest.mark.parametrize("fault", [rows_read_twice, loss_per_rank])
def test_planted_faults_are_caught(tmp_path, model_dir, expected, fault):
    on_ranks(2, fault, tmp_path, model_dir, STEPS, store_data(tmp_path))
    with pytest.raises(AssertionError):
        assert_equal(read_back(tmp_path, num_steps=STEPS), expected)
