"""Each script of examples/ through the real command, on a small model and few rows; its YAML says all the rest."""

import json
import os
import subprocess
import sys

import datasets
import pytest
from PIL import Image

from tests.runs.commands import ROOT, burnish, environment, metrics
from tests.toys import chat, save_model, write_jsonl
from tests.vision_models import save_vision_model

NUM_ROWS = 140
ON_CPU = ("megatron_config.cpu=true", "placement.num_gpus_per_node=4")
ON_TWO = ("megatron_config.cpu=true", "placement.num_gpus_per_node=2")
ONE_STAGE = (*ON_TWO, "megatron_config.pipeline_model_parallel_size=1")
TWO_STAGES = (*ON_TWO, "megatron_config.tensor_model_parallel_size=1")
SCRIPTS = {str(file.relative_to(ROOT / "examples")) for file in (ROOT / "examples").rglob("*.sh")}
RUN_HERE = {
    "run_sft_fsdp.sh",
    "run_sft_megatron.sh",
    "run_sft_megatron_packed.sh",
    "run_sft_megatron_tulu3_50k.sh",
    "run_sft_megatron_vlm.sh",
    "run_sft_fsdp_vlm.sh",
    "lora/run.sh",
    "mixing/run.sh",
    "curriculum/run.sh",
    "callbacks/run.sh",
    "pretokenized_s3/run.sh",
}


@pytest.fixture
def start_folder(tmp_path):
    """Where a user starts the examples: they are there, and ``burnish`` is on the path."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = tmp_path / "bin" / "burnish"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m burnish "$@"\n')
    command.chmod(0o755)
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return f"model.path={save_model(tmp_path_factory.mktemp('model'))}"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """As many as the slices of the examples ask for."""
    made = [chat(f"question {number}", f"answer {number}") for number in range(NUM_ROWS)]
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", made)


def example(script, *words, folder, steps=2):
    """Run ``script`` as its reader would; returns what it said."""
    around = environment(folder)
    done = subprocess.run(
        [f"examples/{script}", *words, f"num_steps={steps}"],
        cwd=folder,
        env=around | {"PATH": f"{folder / 'bin'}{os.pathsep}{around['PATH']}"},
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def answers(run):
    """What the model said to the prompts of its YAML."""
    return [json.loads(line) for line in (run / "answers.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_script_is_run_here():
    assert SCRIPTS == RUN_HERE


def test_the_two_backends_say_the_same_of_the_same_rows(start_folder, model, rows):
    data = (model, f"train_datasets={rows}")
    example("run_sft_fsdp.sh", *data, f"eval_datasets={rows}", folder=start_folder)
    example("run_sft_megatron.sh", *data, *ON_CPU, folder=start_folder)
    fsdp, megatron = (metrics(start_folder, f"run_sft_{name}") for name in ("fsdp", "megatron"))
    assert (list(fsdp), list(megatron)) == ([0, 1, 2], [1, 2])
    assert megatron[1]["train/loss"] == pytest.approx(fsdp[1]["train/loss"], rel=1e-5)
    assert fsdp[2]["eval/held_out/num_targets"] == 32 * len("answer 100 ")
    run = start_folder / "runs/run_sft_fsdp"
    assert (run / "checkpoints/hf_exports/global_step_2/model.safetensors").is_file()
    assert [answer["step"] for answer in answers(run)] == [0, 0, 2, 2]
    assert "What is the capital of France?" in (run / "report.html").read_text(encoding="utf-8")


def test_packed_on_megatron(start_folder, model, rows):
    words = (model, f"train_datasets={rows}", "max_length=256", *ONE_STAGE)
    example("run_sft_megatron_packed.sh", *words, folder=start_folder)
    assert metrics(start_folder, "run_sft_megatron")[2]["train/packing_efficiency"] > 0.5


def test_tulu_saves_and_exports(start_folder, model, rows):
    words = (model, f"train_datasets={rows}", "train_dataset_splits=train", "batch_size=16", *ONE_STAGE)
    words += ("max_length=256", "max_tokens_per_microbatch=512")
    example("run_sft_megatron_tulu3_50k.sh", *words, folder=start_folder)
    assert list(metrics(start_folder, "tulu3-50k")) == [1, 2]
    checkpoints = start_folder / "runs/tulu3-50k/checkpoints"
    assert (checkpoints / "global_step_2" / "COMPLETE").is_file()
    assert (checkpoints / "hf_exports" / "global_step_2" / "model.safetensors").is_file()


def test_adapters(start_folder, model):
    example("lora/run.sh", model, "hf_save_interval=2", folder=start_folder)
    assert metrics(start_folder, "lora")[2]["eval/heldout/loss"] > 0
    export = start_folder / "runs/lora/export/global_step_2"
    assert (export / "model.safetensors").is_file()
    assert json.loads((export / "adapter" / "adapter_config.json").read_text())["r"] == 8


def test_two_sources_and_two_eval_sets(start_folder, model):
    example("mixing/run.sh", model, folder=start_folder)
    last = metrics(start_folder, "mixing")[2]
    assert {"eval/desk/loss", "eval/pirate/loss"} < last.keys()
    assert len([key for key in last if key.startswith("train/loss/")]) == 2
    asked = ["What is the price of membership?", "What is a guitar?"]
    assert [answer["prompt"] for answer in answers(start_folder / "runs/mixing")] == asked * 2, "at step 0 and the last"


def test_short_rows_first(start_folder, model):
    example("curriculum/run.sh", model, folder=start_folder, steps=3)
    found = metrics(start_folder, "curriculum")
    assert all(512 < found[step]["train/num_tokens"] <= 1024 for step in (1, 2, 3))


def test_a_run_stops_when_it_does_not_get_better(start_folder, model):
    words = ("optimizer_config.lr=0", "eval_interval=1", "max_length=256")
    example("callbacks/run.sh", model, *words, folder=start_folder, steps=100)
    assert list(metrics(start_folder, "callbacks")) == [1, 2, 3, 4], "the first is the best, and three are not better"
    saved = sorted(folder.name for folder in (start_folder / "runs/callbacks/checkpoints").glob("global_step_*"))
    assert saved == ["global_step_1", "global_step_4"]


def test_rows_tokenized_into_a_bucket_and_trained_from_there(start_folder, model, rows, s3_bucket):
    s3_bucket.put("before", b"this server makes a bucket with its first object")
    stores = [s3_bucket.uri(f"stores/{name}") for name in ("alpaca", "alpaca-heldout")]
    words = (f"{start_folder}/examples/run_sft_fsdp.yaml", model, f"train_datasets={rows}")
    for store, part in zip(stores, ("train[:100]", "train[100:132]"), strict=True):
        made = burnish("tokenize", *words, f"train_dataset_splits=['{part}']", f"out={store}", folder=start_folder)
        assert made.returncode == 0, made.stderr
    keys = (f"pretokenized_dataset_paths=[{stores[0]}]", f"eval_pretokenized_dataset_paths=[{stores[1]}]")
    said = example("pretokenized_s3/run.sh", model, *keys, folder=start_folder)
    assert all(f"{store}: fetching 1 of 1 objects" in said for store in stores)
    found = metrics(start_folder, "pretokenized_s3")
    assert found[2]["eval/heldout/num_targets"] == 32 * len("answer 100 ")


def cauldron(file):
    """Six rows as the public set has them: one or two images, one or two questions."""
    shades = [Image.new("RGB", (16 + 8 * (number % 3), 16), (40 * number, 90, 10)) for number in range(6)]
    texts = [
        [{"user": f"which shade is {n}?", "assistant": f"shade {n}", "source": "made"}] * (1 + n % 2) for n in range(6)
    ]
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "texts": datasets.List({name: datasets.Value("string") for name in ("user", "assistant", "source")}),
        }
    )
    made = {"images": [[shade] * (1 + n % 3 // 2) for n, shade in enumerate(shades)], "texts": texts}
    datasets.Dataset.from_dict(made, features=features).to_parquet(file)


def test_a_public_set_of_pictures_is_prepared_and_trained_on_both_backends(start_folder):
    cauldron(start_folder / "cauldron" / "part-0.parquet")
    words = ["cauldron", "--rows", "4", "--heldout", "2", "--out", "data/vqav2"]
    done = subprocess.run(
        [sys.executable, "examples/prepare_cauldron_vlm.py", *words],
        cwd=start_folder,
        env=environment(start_folder),
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.stdout == "data/vqav2/heldout.parquet: 2 rows\ndata/vqav2/train.parquet: 4 rows\n", done.stderr
    model = f"model.path={save_vision_model(start_folder / 'model', 'qwen2_5_vl', layers=4)}"
    small = (model, "max_length=200", "max_tokens_per_microbatch=400", "batch_size=4")
    example("run_sft_fsdp_vlm.sh", *small, "placement.num_gpus_per_node=1", folder=start_folder)
    example("run_sft_megatron_vlm.sh", *small, *TWO_STAGES, folder=start_folder)
    fsdp, megatron = (metrics(start_folder, name) for name in ("vqav2", "run_sft_megatron_vlm"))
    assert fsdp[0]["eval/heldout/loss"] > 0
    assert megatron[1]["train/loss"] == pytest.approx(fsdp[1]["train/loss"], rel=1e-5)
