"""Burnish equals a loop written by hand, whatever the shape of its batches; a planted fault is caught."""

import dataclasses

import numpy as np
import pytest

from burnish import SFTConfig
from burnish.api import evaluate
from burnish.data import batch as batch_module
from burnish.data import stream as stream_module
from burnish.models.loss import LossModel
from tests.parity import reference
from tests.parity.runs import LR, ROWS, assert_equal, batches, batches_of_tokens, raw_data, run, store_data
from tests.toys import row, write_jsonl

STEPS = 5


@pytest.fixture(scope="module")
def expected(model_dir):
    losses, norms, weights = reference.train(model_dir, batches(STEPS), lr=LR)
    return {"losses": losses, "norms": norms, "weights": weights}


SHAPES = {
    "alone": {"micro_train_batch_size_per_gpu": 1},
    "padded": {"micro_train_batch_size_per_gpu": 4, "remove_microbatch_padding": False},
    "padded by two": {"micro_train_batch_size_per_gpu": 2, "remove_microbatch_padding": False},
    "in a row": {"micro_train_batch_size_per_gpu": 4},
    "in a row of eight": {"micro_train_batch_size_per_gpu": 8},
    "bins": {"use_sequence_packing": True},
    "bins of two": {"use_sequence_packing": True, "max_tokens_per_microbatch": 200},
    "one bin": {"use_sequence_packing": True, "max_tokens_per_microbatch": 1000},
    "readers": {"dataloader_num_workers": 2},
    "recomputed": {"fsdp_config": {"activation_checkpointing": True}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_chat_rows(tmp_path, model_dir, expected, shape):
    assert_equal(run(tmp_path, model_dir=model_dir, num_steps=STEPS, **raw_data(tmp_path), **SHAPES[shape]), expected)


@pytest.mark.parametrize("shape", ["padded", "in a row"])
def test_the_same_rows_pretokenized(tmp_path, model_dir, expected, shape):
    assert_equal(run(tmp_path, model_dir=model_dir, num_steps=STEPS, **store_data(tmp_path), **SHAPES[shape]), expected)


def test_raw_and_pretokenized_are_the_same_to_the_bit(tmp_path, model_dir):
    runs = [
        run(tmp_path / name, model_dir=model_dir, num_steps=STEPS, **data(tmp_path / name))
        for name, data in (("raw", raw_data), ("store", store_data))
    ]
    assert runs[0]["losses"] == runs[1]["losses"]
    assert runs[0]["norms"] == runs[1]["norms"]


@pytest.mark.parametrize("tokens", [60, 240])
@pytest.mark.parametrize("packing", [{}, {"use_sequence_packing": True}], ids=["in a row", "bins"])
def test_steps_of_tokens(tmp_path, model_dir, tokens, packing):
    steps = batches_of_tokens(STEPS, tokens)
    losses, norms, weights = reference.train(model_dir, steps, lr=LR)
    got = run(tmp_path, model_dir=model_dir, num_steps=STEPS, batch_tokens=tokens, **store_data(tmp_path), **packing)
    assert_equal(got, {"losses": losses, "norms": norms, "weights": weights})
    assert len({len(step) for step in steps}) > 1 or tokens == 60


def test_steps_of_tokens_are_those_of_as_many_rows_to_the_bit(tmp_path, model_dir):
    rows = [row(list(range(3 + number, 13 + number)), [0, 0, 1, 1, 1, 0, 1, 1, 1, 1]) for number in range(8)]
    data = {"pretokenized_dataset_paths": [str(write_jsonl(tmp_path / "rows.jsonl", rows))], "sampler": "random"}
    by_rows, by_tokens = (
        run(tmp_path / name, model_dir=model_dir, num_steps=STEPS, **data, **size)
        for name, size in (("rows", {"batch_size": 3}), ("tokens", {"batch_tokens": 39}))
    )
    assert by_rows["losses"] == by_tokens["losses"]
    assert by_rows["norms"] == by_tokens["norms"]


@pytest.mark.parametrize("shape", ["alone", "padded", "in a row", "bins of two"])
@pytest.mark.parametrize(
    "objective", [{"label_smoothing": 0.1}, {"z_loss": 0.01}, {"label_smoothing": 0.2, "z_loss": 0.1}]
)
def test_other_objectives(tmp_path, model_dir, objective, shape):
    losses, norms, weights = reference.train(model_dir, batches(STEPS), lr=LR, **objective)
    keys = {**store_data(tmp_path), **SHAPES[shape], **objective}
    got = run(tmp_path, model_dir=model_dir, num_steps=STEPS, **keys)
    assert_equal(got, {"losses": losses, "norms": norms, "weights": weights})


EVALUATIONS = {
    "alone": {"micro_train_batch_size_per_gpu": 1},
    "padded": {"micro_train_batch_size_per_gpu": 8, "remove_microbatch_padding": False},
    "large": {"micro_train_batch_size_per_gpu": 8, "batch_size": 100},
    "packed": {"use_sequence_packing": True},
    "packed, large": {"use_sequence_packing": True, "max_tokens_per_microbatch": 300, "batch_size": 100},
    "tokens": {"use_sequence_packing": True, "batch_tokens": 400, "num_steps": 1},
}


def test_an_evaluation_depends_on_no_layout(tmp_path, model_dir):
    (mean,), _, _ = reference.train(model_dir, [ROWS], lr=0.0)
    (store,) = store_data(tmp_path)["pretokenized_dataset_paths"]
    base = {
        "model": {"path": str(model_dir)},
        "max_length": 128,
        "label_smoothing": 0.1,
        "eval_pretokenized_dataset_paths": [store],
    }
    for name, keys in EVALUATIONS.items():
        (found,) = evaluate(SFTConfig(**base, **keys)).values()
        assert found["loss"] == pytest.approx(mean, rel=1e-5), name
        assert found["num_targets"] == sum(sum(mask[1:]) for _, mask in ROWS)


def shift_by_one(monkeypatch):
    """Labels are the tokens themselves."""

    def unshifted(*arguments, **options):
        made = batch_module.collate(*arguments, **options)
        return dataclasses.replace(made, labels=np.roll(made.labels, 1, axis=1))

    monkeypatch.setattr(stream_module, "collate", unshifted)


def mask_of_the_neighbour(monkeypatch):
    """Each row is trained with the mask of the row before it."""

    def swapped(examples, plan, **options):
        masks = np.roll(np.concatenate([examples[p].loss_mask for p in sorted(examples)]), 3)
        stops = np.cumsum([len(examples[p].loss_mask) for p in sorted(examples)])[:-1]
        parts = dict(zip(sorted(examples), np.split(masks, stops), strict=True))
        wrong = {p: dataclasses.replace(e, loss_mask=parts[p]) for p, e in examples.items()}
        return batch_module.collate(wrong, plan, **options)

    monkeypatch.setattr(stream_module, "collate", swapped)


def loss_per_micro_batch(monkeypatch):
    """The mean of the micro-batches' means: targets of short rows weigh too much."""
    build, forward = stream_module.BatchBuilder.build, LossModel.forward
    whole = {}

    def noted(self, draw):
        made = build(self, draw)
        whole.update(targets=made.num_targets, parts=len(made.micro_batches))
        return made

    def averaged(self, *arguments, **inputs):
        loss, by_source = forward(self, *arguments, **inputs)
        factor = whole["targets"] / (whole["parts"] * len(inputs["target_ids"])) if whole else 1.0
        return loss * factor, by_source * factor

    monkeypatch.setattr(stream_module.BatchBuilder, "build", noted)
    monkeypatch.setattr(LossModel, "forward", averaged)


def leak_between_segments(monkeypatch):
    """All examples of a row are one segment."""

    def joined(*arguments, **options):
        made = batch_module.collate(*arguments, **options)
        return dataclasses.replace(made, segment_ids=np.minimum(made.segment_ids, 1))

    monkeypatch.setattr(stream_module, "collate", joined)


@pytest.mark.parametrize("fault", [shift_by_one, mask_of_the_neighbour, loss_per_micro_batch, leak_between_segments])
def test_planted_faults_are_caught(tmp_path, model_dir, expected, monkeypatch, fault):
    fault(monkeypatch)
    got = run(tmp_path, model_dir=model_dir, num_steps=STEPS, **store_data(tmp_path))
    with pytest.raises(AssertionError):
        assert_equal(got, expected)
