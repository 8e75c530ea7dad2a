"""Rows with and without images through the real command: on two ranks as on one, online as tokenized, resumed as unbroken."""

import base64
import contextlib
import io
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from burnish.cli.main import main
from tests.runs.commands import ROOT, burnish, environment, metrics
from tests.toys import chat, write_jsonl
from tests.vision_models import save_vision_model

TWO = "placement.num_gpus_per_node=2"
PACKED = ("use_sequence_packing=true", "max_tokens_per_microbatch=200")
SIZES = [(16, 16), (24, 16), (16, 40), (32, 32)]


def picture(seed):
    width, height = SIZES[seed % len(SIZES)]
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return {"type": "image", "base64": base64.b64encode(stream.getvalue()).decode()}


def conversation(number):
    """Every third row is of text; of the others some have two images, in one turn or in two."""
    if number % 3 == 0:
        return chat(f"question {number}", "answer " * (1 + number % 4))
    asked = [picture(number), {"type": "text", "text": f"what is {number}?"}]
    turns = [asked, f"it is {number}"]
    if number % 4 == 1:
        turns += [[{"type": "text", "text": "and"}, picture(number + 1)], "that too"]
    return chat(*turns)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rows = write_jsonl(folder / "rows.jsonl", [conversation(number) for number in range(24)])
    model = save_vision_model(folder / "model", "qwen3_vl", layers=4)
    return {
        "train": (f"train_datasets={rows}", "num_workers=0", "train_on_what=all_assistant_messages"),
        "model": (f"model.path={model}", "max_length=100", "batch_size=8", "num_steps=4", "optimizer_config.lr=1e-3"),
    }


def losses(folder, run_name):
    return [line["train/loss"] for line in metrics(folder, run_name).values()]


def run(command, *arguments, folder):
    """In this process, which is much faster; the ranks of ``TWO`` are processes of their own."""
    if TWO in arguments:
        done = burnish(command, *arguments, folder=folder)
        assert done.returncode == 0, done.stderr
        return
    with contextlib.chdir(folder):
        assert main([command, *arguments]) == 0


MEGATRON = ("strategy=megatron", "megatron_config.cpu=true", "megatron_config.pipeline_model_parallel_size=2")


def test_mixed_rows_packed_on_two_ranks_equal_one(tmp_path, keys):
    given = (*keys["train"], *keys["model"])
    run("train", *given, "run_name=one", "micro_train_batch_size_per_gpu=1", folder=tmp_path)
    expected = losses(tmp_path, "one")
    run("train", *given, *PACKED, "run_name=packed", folder=tmp_path)
    run("train", *given, *PACKED, TWO, "run_name=two", folder=tmp_path)
    run("train", *given, *PACKED, TWO, *MEGATRON, "images=lazy", "run_name=megatron", folder=tmp_path)
    assert len(expected) == 4
    assert losses(tmp_path, "packed") == pytest.approx(expected, rel=1e-5)
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "packed"), rel=1e-6)
    assert losses(tmp_path, "megatron") == pytest.approx(losses(tmp_path, "packed"), rel=1e-6)


def test_a_tokenized_store_trains_to_the_bit_as_the_rows_it_is_made_of(tmp_path, keys):
    run("train", *keys["train"], *keys["model"], *PACKED, "run_name=online", folder=tmp_path)
    run("tokenize", *keys["train"], *keys["model"][:2], "out=store", folder=tmp_path)
    store = f"pretokenized_dataset_paths={tmp_path / 'store'}"
    run("train", store, *keys["model"], *PACKED, "run_name=stored", folder=tmp_path)
    assert losses(tmp_path, "stored") == losses(tmp_path, "online")


def test_a_resumed_run_is_the_unbroken_one_to_the_bit(tmp_path, keys):
    given = (*keys["train"], *keys["model"], *PACKED, f"ckpt_path={tmp_path / 'ckpt'}", "ckpt_interval=2")
    given = (*given, "hf_save_interval=4")
    run("train", *given, f"export_path={tmp_path / 'unbroken'}", "run_name=unbroken", folder=tmp_path)
    expected = losses(tmp_path, "unbroken")
    shutil.rmtree(tmp_path / "ckpt" / "global_step_4")
    again = (f"export_path={tmp_path / 'resumed'}", "run_name=resumed", "resume_from=latest")
    run("train", *given, *again, folder=tmp_path)
    assert losses(tmp_path, "resumed") == expected[2:]
    ends = [load_file(tmp_path / name / "global_step_4" / "model.safetensors") for name in ("unbroken", "resumed")]
    assert ends[0].keys() == ends[1].keys()
    assert all(ends[0][name].equal(ends[1][name]) for name in ends[0])


def test_the_example_shows_pictures_and_answers(tmp_path):
    words = [
        "num_steps=2",
        "hf_save_interval=2",
        "eval_interval=2",
        f"log_dir={tmp_path}",
        f"export_path={tmp_path}/out",
    ]
    done = subprocess.run(
        [sys.executable, "examples/images/images.py", *words, f"cache_dir={tmp_path}/cache"],
        cwd=ROOT,
        env=environment(tmp_path),
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "images" / "images.html").read_text()
    assert re.search(
        r"\n  \d+ of 40 answers are right\n  step   0   held out 5\.\d+\n  step   2   held out ", done.stdout
    )
    assert page.count("<figure>") == 40
    assert page.count("data:image/png;base64,") > 40
