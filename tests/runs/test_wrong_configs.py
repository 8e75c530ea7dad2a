"""Mistakes that are really made, each answered by words that a stranger can act on, and by nothing else."""

import subprocess
import sys

import pytest

from tests.runs.commands import environment
from tests.storage.test_transfer import inside_mount
from tests.toys import chat, write_jsonl

ROWS = [chat(f"question {n}", f"answer {n} " * 20) for n in range(400)]


@pytest.fixture
def said(tmp_path, model_dir):
    """What a command says of a config of these ``lines``; paths of this test are left out."""
    (tmp_path / "model").symlink_to(model_dir)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)

    def run(command, lines, *, before=()):
        (tmp_path / "run.yaml").write_text(f"model: {{path: model}}\nnum_workers: 0\nnum_steps: 2\n{lines}\n")
        words, settings = [*before, sys.executable, "-m", "burnish", command, "run.yaml"], environment(tmp_path)
        done = subprocess.run(
            words, check=False, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=settings
        )
        assert done.returncode == 2, done.stderr
        assert (done.stdout, "Traceback" in done.stderr) == ("", False)
        return done.stderr.replace(str(tmp_path), "HERE")

    return run


def test_a_path_that_is_not_there(said):
    assert said("check", "train_datasets: [data/rows.jsonl]") == (
        "config: 1 problem\n"
        "  train data='data/rows.jsonl': no such path in HERE\n"
        "    fix: write the whole path; ~ and $NAMES inside quotes are not replaced by the shell\n"
    )


def test_a_column_of_another_name(said, tmp_path):
    write_jsonl(tmp_path / "chats.jsonl", [{"id": n, "dialogue": row["messages"]} for n, row in enumerate(ROWS)])
    assert said("check", "train_datasets: [chats.jsonl]") == (
        "config: 1 problem\n"
        "  train data='chats.jsonl': no chat, prompt or Alpaca rows; the columns are id, dialogue\n"
        "    fix: store messages ({role, content} each), prompt and completion, or instruction and output; or set "
        "messages_key\n"
    )


def test_a_store_without_masks(said, tmp_path):
    write_jsonl(tmp_path / "store" / "part-0.jsonl", [{"input_ids": [4, 5, 6]}] * 8)
    assert said("check", "pretokenized_dataset_paths: [store]") == (
        "config: 1 problem\n"
        "  train data='store': store/part-0.jsonl, row 0: has no loss_mask\n"
        "    fix: store one 0 or 1 for every token of the row: 1 where the token is to be predicted\n"
    )


def test_processes_that_the_sizes_of_megatron_do_not_divide(said):
    sizes = "tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2"
    lines = f"strategy: megatron\nplacement: {{num_gpus_per_node: 12}}\nmegatron_config: {{{sizes}, cpu: true}}"
    assert said("check", f"train_datasets: [rows.jsonl]\n{lines}") == (
        "config: 1 problem\n"
        "  megatron_config.tensor_model_parallel_size=4: tensor 4 * pipeline 2 * context 1 does not divide 12 processes\n"
        "    fix: give sizes whose product divides that, or another placement.num_gpus_per_node\n"
    )


@pytest.mark.parametrize("command", ["check", "train"])
def test_no_space(said, tmp_path, command):
    (tmp_path / "small").mkdir()
    mount = inside_mount(f"mount -t tmpfs -o size=64k none {tmp_path}/small")
    shown = said(
        command,
        "train_datasets: [rows.jsonl]\nckpt_path: kept\ncache_dir: small",
        before=["sh", "-c", f'{mount} "$@"', "sh"],
    )
    message = "is full (No space left on device)"
    fix = "fix: free some space, or set cache_dir to a folder with more\n"
    if command == "check":
        assert shown == f"config: 1 problem\n  train data='rows.jsonl': small/tokenized: {message}\n    {fix}"
    else:
        assert shown.endswith(f"\n\nsmall/tokenized: {message}\n  {fix}")
    assert not list((tmp_path / "small").iterdir())
