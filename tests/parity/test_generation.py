"""Answering prompts changes nothing of a run, and the answers do not depend on how it is run."""

import json

import pytest

from tests.parity.runs import config_of, run, run_on, store_data, train_as_rank
from tests.parity.test_resume import assert_same_bits, in_two
from tests.ranks import on_ranks
from tests.toys import chat, write_jsonl
from tests.vision_models import save_vision_model

PROMPTS = ["say alpha", "say zeta! and then some more"]
ASKED = {
    "eval_generate": {"prompts": PROMPTS, "every": 2, "max_new_tokens": 6},
    "eval_interval": 1,
    "eval_before_train": True,
}
STEPS = 6
KEYS = {"sampler": "random", "optimizer_config": {"lr": 1e-2, "eps": 1e-6}}
LORA = {"model": {"lora": {"rank": 4, "dropout": 0.1}}}


def answers(folder):
    """By (step, prompt); the last of those that stand twice."""
    lines = (folder / "runs" / "sft" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return {(line["step"], line["prompt"]): line["answer"] for line in map(json.loads, lines)}


def expected_keys(*steps):
    return {(step, prompt) for step in steps for prompt in PROMPTS}


@pytest.mark.parametrize("kind", ["weights", "adapters"])
def test_a_run_that_answers_is_the_run_that_does_not(tmp_path, model_dir, kind):
    keys = {**KEYS, **store_data(tmp_path)}
    if kind == "adapters":
        keys["model"] = {"path": str(model_dir), **LORA["model"]}
    plain = run(tmp_path / "plain", model_dir=model_dir, num_steps=STEPS, **keys)
    asked = run(tmp_path / "asked", model_dir=model_dir, num_steps=STEPS, **keys, **ASKED)
    assert_same_bits(asked, plain)
    found = answers(tmp_path / "asked")
    assert found.keys() == expected_keys(0, 2, 4, 6)
    assert len({found[step, PROMPTS[0]] for step in (0, 2, 4, 6)}) > 1, "the weights of the step are asked"
    assert not (tmp_path / "plain" / "runs" / "sft" / "answers.jsonl").exists()


def test_two_ranks_answer_as_one(tmp_path, model_dir):
    keys = {**KEYS, **store_data(tmp_path), **ASKED}
    run_on(1, tmp_path / "one", model_dir=model_dir, num_steps=STEPS, **keys)
    run_on(2, tmp_path / "two", model_dir=model_dir, num_steps=STEPS, **keys, sequence_parallel_size=2)
    assert answers(tmp_path / "two") == answers(tmp_path / "one")


def test_a_resumed_run_counts_on_and_answers_alike(tmp_path, model_dir):
    keys = {**KEYS, **store_data(tmp_path), **ASKED}
    whole = run(tmp_path / "whole", model_dir=model_dir, num_steps=STEPS, **keys)
    parts = in_two(tmp_path / "parts", model_dir=model_dir, at=3, num_steps=STEPS, **keys)
    assert_same_bits(parts, whole)
    found = answers(tmp_path / "parts")
    assert found.keys() == expected_keys(0, 2, 3, 4, 6), "a run that is stopped answers at its end"
    assert {key: answer for key, answer in found.items() if key[0] != 3} == answers(tmp_path / "whole")


def test_a_model_that_takes_images_is_asked_in_words(tmp_path):
    folder = save_vision_model(tmp_path / "model", "qwen2_5_vl")
    chats = write_jsonl(tmp_path / "chats.jsonl", [chat("say hi", "hi"), chat("say ho", "ho")])
    keys = {"train_datasets": [str(chats)], **ASKED, "hf_save_interval": 0, "batch_size": 2}
    config = config_of(tmp_path, model_dir=folder, num_steps=2, **keys)
    assert config.eval_generate.prompts == tuple(PROMPTS)
    on_ranks(1, train_as_rank, tmp_path, folder, 2, keys)
    assert answers(tmp_path).keys() == expected_keys(0, 2)
