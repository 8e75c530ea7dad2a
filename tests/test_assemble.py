"""From a config to parts: what is refused before anything is loaded."""

import json
import sys
from contextlib import nullcontext

import pytest

from burnish.assemble.data import open_train
from burnish.assemble.model import require_valid
from burnish.assemble.outputs import require_writable
from burnish.assemble.run import build_checkpointer, build_run, find_start
from burnish.backends.comm import alone, joined
from burnish.config import SFTConfig, load_config
from burnish.errors import CheckpointError, ConfigError, DataError
from burnish.models.load import read_card
from burnish.train.trackers import Trackers
from tests.toys import chat, row, write_jsonl
from tests.train.fakes import CountingBackend, Recorder


def config(**values):
    return SFTConfig(model={"path": "m"}, **values)


def test_the_folders_of_a_run_are_made_before_it_begins(tmp_path):
    require_writable(config(log_dir=str(tmp_path / "l"), ckpt_path=str(tmp_path / "c"), hf_save_interval=2))
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")} == {"l", "l/sft", "c", "c/hf_exports"}


def test_every_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    places = {key: str(tmp_path / "file" / key) for key in ("log_dir", "ckpt_path", "export_path")}
    with pytest.raises(ConfigError) as caught:
        require_writable(config(**places, hf_save_interval=1))
    assert [problem.key for problem in caught.value.problems] == ["log_dir", "ckpt_path", "export_path"]
    assert all("cannot be written" in problem.message for problem in caught.value.problems)
    with pytest.raises(ConfigError, match="too long"):
        require_writable(config(log_dir=str(tmp_path), run_name="x" * 300))


def test_each_source_has_a_loss_of_its_own_also_where_names_are_alike(tmp_path, model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_jsonl(tmp_path / "rows.jsonl", [chat("a", "b")] * 4)
    options = {"train_datasets": [str(file)] * 2, "train_dataset_splits": ["train[:1]", "train[1:]"], "batch_size": 4}
    run = SFTConfig(model={"path": str(model_dir)}, num_workers=0, num_steps=1, **options)
    with joined() as ranks, build_run(run, ranks=ranks, interrupted=lambda: False) as trainer:
        trainer.train()
    line = json.loads((tmp_path / "runs" / "sft" / "metrics.jsonl").read_text())
    assert [key for key in line if key.startswith("train/loss")] == [
        "train/loss",
        "train/loss/0.rows.jsonl",
        "train/loss/1.rows.jsonl",
    ]


@pytest.mark.parametrize("failed", [False, True])
def test_trackers_are_told_how_the_run_ended(tmp_path, model_dir, monkeypatch, failed):
    recorder = Recorder()
    trackers = Trackers([recorder], identity="")
    monkeypatch.setattr("burnish.assemble.run.build_trackers", lambda *_, **__: trackers)
    file = write_jsonl(tmp_path / "rows.jsonl", [chat("a", "b")] * 4)
    run = SFTConfig(model={"path": str(model_dir)}, train_datasets=[str(file)], log_dir=str(tmp_path), num_steps=1)
    with (
        pytest.raises(RuntimeError) if failed else nullcontext(),
        joined() as ranks,
        build_run(run, ranks=ranks, interrupted=lambda: False),
    ):
        if failed:
            raise RuntimeError
    assert recorder.failed is failed


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(model_dir, monkeypatch):
    words = (f"model.path={model_dir}", "train_datasets=x", "logger=[console,wandb,mlflow]")
    monkeypatch.setattr("burnish.assemble.model.find_spec", lambda name: None if name == "mlflow" else sys.__spec__)
    with pytest.raises(ConfigError) as error:
        require_valid(load_config(None, list(words)))
    (problem,) = error.value.problems
    assert (problem.key, problem.message) == ("logger", "mlflow is not installed")
    assert problem.fix == "pip install 'burnish[mlflow]'"


def test_a_row_longer_than_the_positions_of_the_model_is_named(tmp_path, model_dir):
    card = read_card(str(model_dir))
    assert card.max_position_embeddings == 512
    rows = [row([5] * length, [1] * length) for length in (512, 3, 513)]
    store = {"pretokenized_dataset_paths": [str(write_jsonl(tmp_path / "rows.jsonl", rows))]}
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: has 513 tokens, and the model 512 positions"):
        open_train(config(**store), card)
    (opened,) = open_train(config(**store, max_length=512), card)
    assert opened.lengths.tolist() == [512, 3, 512]


def test_another_number_of_tokens_a_step_is_another_run(tmp_path):
    first, second = (
        build_checkpointer(config(ckpt_path=str(tmp_path), num_steps=2, batch_tokens=tokens), [], alone())
        for tokens in (100, 200)
    )
    folder = first.save(CountingBackend(), step=1, state={})
    first.finish()
    assert first.read(folder, allow_changes=False) == {}
    with pytest.raises(CheckpointError, match="batch_tokens was 100, is 200"):
        second.read(folder, allow_changes=False)


@pytest.mark.parametrize(
    ("key", "value"), [("model.attention", "flash"), ("model.attention", "flex"), ("fsdp_config.compile", "true")]
)
def test_what_needs_a_gpu_is_refused_before_the_run_where_there_is_none(model_dir, monkeypatch, key, value):
    config = load_config(None, [f"model.path={model_dir}", "train_datasets=x", f"{key}={value}"])
    monkeypatch.setattr("burnish.assemble.model.device_type", lambda: "cpu")
    with pytest.raises(ConfigError) as error:
        require_valid(config)
    assert [problem.key for problem in error.value.problems] == [key]
    assert "there is no" in error.value.problems[0].message
    monkeypatch.setattr("burnish.assemble.model.device_type", lambda: "cuda")
    require_valid(config)


CUT = ("strategy=megatron", "placement.num_gpus_per_node=15")
SIZES = ("megatron_config.tensor_model_parallel_size=5", "megatron_config.pipeline_model_parallel_size=3")


def of_megatron(model_dir, *words):
    """What keeps a model of two layers and four heads from being trained with these ``words``."""
    config = load_config(None, [f"model.path={model_dir}", "train_datasets=x", *CUT, *words])
    with pytest.raises(ConfigError) as error:
        require_valid(config)
    return [(problem.key, problem.message, problem.fix) for problem in error.value.problems]


def test_all_that_keeps_megatron_from_a_model_is_told_at_once_and_without_it(model_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    found = of_megatron(model_dir, *SIZES)
    assert found[:2] == [
        ("strategy", "needs Megatron Core, which is not installed", "pip install 'burnish[megatron]'"),
        ("strategy", "needs a GPU, and there is none", "write strategy=fsdp; to test with, megatron_config.cpu=true"),
    ]
    assert {(key, message) for key, message, _ in found[2:]} >= {
        ("megatron_config.tensor_model_parallel_size", "does not divide the model's 4 attention heads"),
        ("megatron_config.pipeline_model_parallel_size", "does not divide the model's 2 layers"),
    }


def test_the_rules_of_megatron_are_known_without_importing_it(model_dir):
    found = of_megatron(model_dir, *SIZES, "megatron_config.cpu=true")
    assert {key for key, _, _ in found} == {word.partition("=")[0] for word in SIZES}
    assert "megatron.core" not in sys.modules


def test_the_stand_in_for_a_gpu_is_refused_where_there_is_one(model_dir, monkeypatch):
    monkeypatch.setattr("burnish.assemble.model.device_type", lambda: "cuda")
    monkeypatch.setattr("burnish.assemble.model.device_count", lambda: 15)
    assert of_megatron(model_dir, "megatron_config.cpu=true") == [
        ("megatron_config.cpu", "there is a GPU on this machine", "leave it out")
    ]


def test_a_checkpoint_of_the_other_strategy_is_refused_before_the_model_is_read(tmp_path):
    saved = build_checkpointer(config(ckpt_path=str(tmp_path)), [], alone())
    saved.save(CountingBackend(), step=1, state={})
    saved.finish()
    other = config(ckpt_path=str(tmp_path), resume_from="latest", strategy="megatron")
    with pytest.raises(CheckpointError, match="was written by strategy=fsdp, and this run has strategy=megatron") as e:
        find_start(other, build_checkpointer(other, [], alone()))
    assert f"burnish export {tmp_path}/global_step_1 out=DIR, and model.path=DIR" in e.value.fix


def test_lazy_images_are_nothing_to_a_model_of_text(tmp_path, model_dir):
    card = read_card(str(model_dir))
    data = {"train_datasets": [str(write_jsonl(tmp_path / "rows.jsonl", [chat("a", "b")]))], "num_workers": 0}
    (pixels,), (lazy,) = (open_train(config(**data, images=images), card) for images in ("pixels", "lazy"))
    assert lazy.fingerprint == pixels.fingerprint
