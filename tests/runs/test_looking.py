"""Prompts, profiles and dummy runs through the command itself."""

import gzip
import json

import pytest

from tests.runs.commands import burnish, metrics
from tests.toys import chat, write_jsonl

CHATS = [chat(f"question {i}", f"answer {i}") for i in range(40)]


@pytest.fixture
def run(tmp_path, model_dir):
    """The command with ``words`` on a few chats."""
    chats = write_jsonl(tmp_path / "chats.jsonl", CHATS)

    def call(*words):
        base = [f"model.path={model_dir}", f"train_datasets={chats}", "max_length=64", "num_workers=0", "num_steps=6"]
        return burnish("train", *base, *words, folder=tmp_path)

    return call


def test_prompts_are_answered_and_steps_profiled_on_two_ranks(tmp_path, run):
    words = ["eval_generate.prompts=['who are you?']", "eval_generate.max_new_tokens=3", "eval_interval=3"]
    profile = ["torch_profiler_config.enable=true", "torch_profiler_config.ranks=[1, 0]"]
    result = run(*words, *profile, "torch_profiler_config.with_flops=true", "placement.num_gpus_per_node=2")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/sft/answers.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(3, "who are you?"), (6, "who are you?")]
    assert "step 3: 'who are you?' -> " in result.stderr
    assert "operations by time: " in result.stderr
    traces = sorted((tmp_path / "runs/sft/profile").iterdir())
    assert [file.name for file in traces] == [f"rank_{rank}_window_1.pt.trace.json.gz" for rank in (0, 1)]
    for file in traces:
        names = [event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
        assert "aten::mm" in names
        assert len([name for name in names if name.startswith("ProfilerStep#")]) == 3
    assert sorted(metrics(tmp_path)) == [1, 2, 3, 4, 5, 6], "an evaluation without eval sets has no line"


def test_a_prompt_longer_than_the_model_is_refused_before_anything_loads(run):
    result = run(f"eval_generate.prompts=['{'x' * 5000}']")
    assert result.returncode == 2
    assert "eval_generate.prompts" in result.stderr
    assert "positions" in result.stderr


def test_memory_of_a_cpu_is_not_recorded(run):
    result = run("record_memory=true")
    assert result.returncode == 2
    assert "record_memory=True: records the memory of a GPU" in result.stderr


@pytest.mark.parametrize("layout", [["use_sequence_packing=true"], ["remove_microbatch_padding=false"]], ids=str)
def test_a_dummy_run_is_full_and_leaves_the_run_alone(tmp_path, run, layout):
    words = ["ckpt_path=ckpt", "ckpt_interval=1", "hf_save_interval=1", "eval_datasets=no/such/data", "eval_interval=1"]
    dummy = ["dummy_run_full_ctx=true", "dummy_run_max_steps=3", "train_datasets=/no/such/file", *layout]
    result = run(*words, *dummy, "eval_generate.prompts=hello", "resume_from=latest", "train_dataset_splits=train[:3]")
    assert result.returncode == 0, result.stderr
    steps = metrics(tmp_path, "sft-dummy")
    assert sorted(steps) == [1, 2, 3]
    for step in steps.values():
        assert (step["train/num_tokens"], step["train/num_targets"]) == (4 * 64, 4 * 63)
        assert step["train/packing_efficiency"] == 1.0
    assert "3 steps held at most" in result.stderr
    assert {file.name for file in (tmp_path / "runs").iterdir()} == {"sft-dummy"}
    assert {file.name for file in (tmp_path / "runs/sft-dummy").iterdir()} == {
        "metrics.jsonl",
        "config.yaml",
        "data.json",
        "report.html",
    }
    assert not (tmp_path / "ckpt").exists()
