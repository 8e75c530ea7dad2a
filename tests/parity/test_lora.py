"""Adapters trained by Burnish equal those of peft in a loop written by hand, in every shape and after a resume."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from burnish import SFTConfig, SFTTrainer
from burnish.api import check, evaluate, export
from burnish.errors import CheckpointError, ConfigError
from tests.parity import reference
from tests.parity.runs import LR, assert_equal, batches, config_of, raw_data, read_back, store_data
from tests.parity.test_resume import assert_same_bits, in_two

STEPS = 5
LORA = {"rank": 4, "alpha": 8}


def lora(model_dir, **changes):
    return {"model": {"path": str(model_dir), "lora": LORA | changes}}


def adapter_of(folder, step):
    return folder / "ckpt" / "hf_exports" / f"global_step_{step}" / "adapter"


def trained(folder, *, num_steps=STEPS, **keys):
    """As of any run, but the weights are those of the adapter."""
    SFTTrainer(config_of(folder, num_steps=num_steps, **keys)).train()
    file = adapter_of(folder, num_steps) / "adapter_model.safetensors"
    return read_back(folder, num_steps=num_steps) | {"weights": load_file(file)}


@pytest.fixture(scope="module")
def expected(model_dir, tmp_path_factory):
    """Of the loop by hand, from where a run that learns nothing has ended."""
    folder = tmp_path_factory.mktemp("begun")
    still = {"optimizer_config": {"lr": 0.0, "weight_decay": 0.0}, "cache_dir": str(folder / "cache")}
    trained(folder, num_steps=1, model_dir=model_dir, **lora(model_dir), **store_data(folder), **still)
    losses, norms, weights = reference.train(model_dir, batches(STEPS), lr=LR, adapter=adapter_of(folder, 1))
    return {
        "losses": losses,
        "norms": norms,
        "weights": {name.replace(".default.", "."): weight for name, weight in weights.items()},
    }


SHAPES = {
    "alone": {"micro_train_batch_size_per_gpu": 1},
    "padded": {"micro_train_batch_size_per_gpu": 4, "remove_microbatch_padding": False},
    "in a row": {"micro_train_batch_size_per_gpu": 4},
    "bins of two": {"use_sequence_packing": True, "max_tokens_per_microbatch": 200},
    "recomputed": {"fsdp_config": {"activation_checkpointing": True}},
    "in host memory": {"fsdp_config": {"cpu_offload": True}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_chat_rows(tmp_path, model_dir, expected, shape):
    run = {**lora(model_dir), **raw_data(tmp_path), **SHAPES[shape]}
    assert_equal(trained(tmp_path, model_dir=model_dir, **run), expected)


def test_ten_steps_equal_five_and_five_to_the_bit(tmp_path, model_dir):
    data = store_data(tmp_path) | {"sampler": "random"} | lora(model_dir, dropout=0.3)
    whole = trained(tmp_path / "whole", model_dir=model_dir, num_steps=10, **data)
    in_two(tmp_path / "parts", model_dir=model_dir, at=5, num_steps=10, **data)
    file = adapter_of(tmp_path / "parts", 10) / "adapter_model.safetensors"
    assert_same_bits(read_back(tmp_path / "parts", num_steps=10) | {"weights": load_file(file)}, whole)


def test_the_export_and_the_evaluation_of_a_checkpoint_are_those_of_the_run(tmp_path, model_dir):
    data = store_data(tmp_path)
    evaluated = {"eval_pretokenized_dataset_paths": data["pretokenized_dataset_paths"]}
    keys = {**lora(model_dir), **data, **evaluated}
    trained(tmp_path, model_dir=model_dir, **keys)
    checkpoint = tmp_path / "ckpt" / f"global_step_{STEPS}"
    exported = export(checkpoint, out=tmp_path / "out")
    run_export = adapter_of(tmp_path, STEPS).parent
    names = {p.relative_to(exported).as_posix() for p in exported.rglob("*") if p.is_file()}
    assert {"model.safetensors", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= names
    assert all((exported / name).read_bytes() == (run_export / name).read_bytes() for name in names)
    last = json.loads((tmp_path / "runs" / "sft" / "metrics.jsonl").read_text().splitlines()[-1])
    config = config_of(tmp_path, model_dir=model_dir, num_steps=STEPS, **keys, resume_from=str(checkpoint))
    (found,) = evaluate(config).values()
    assert found["loss"] == last["eval/store.jsonl/loss"]
    merged = config_of(tmp_path, model_dir=exported, num_steps=STEPS, **data, **evaluated)
    (as_merged,) = evaluate(merged).values()
    assert as_merged["loss"] == pytest.approx(found["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, "model.lora.rank was 4, is 2"),
        ({"alpha": 4}, "model.lora.alpha was 8.0, is 4.0"),
        ({"target_modules": ["q_proj"]}, r"model.lora.target_modules was \['all-linear'\], is \['q_proj'\]"),
        ({"rank": 0}, "model.lora.rank was 4, is None"),
    ],
)
def test_other_adapters_do_not_resume(tmp_path, model_dir, changes, message):
    keys = {"model_dir": model_dir, "num_steps": 2, **store_data(tmp_path)}
    SFTTrainer(config_of(tmp_path, **keys, **lora(model_dir))).train()
    with pytest.raises(CheckpointError, match=message):
        SFTTrainer(config_of(tmp_path, **keys, **lora(model_dir, **changes), resume_from="latest")).train()


def test_a_check_names_what_has_no_adapters_and_no_experts(tmp_path, model_dir):
    model = {"path": str(model_dir), "lora": {"rank": 4, "target_modules": ["query", "q_proj"]}}
    config = SFTConfig(model=model | {"router_aux_loss_coef": 0.1}, **store_data(tmp_path))
    by_key = {problem.key: problem for problem in check(config).problems}
    assert by_key.keys() == {"model.lora.target_modules", "model.router_aux_loss_coef"}
    assert "down_proj, gate_proj, k_proj" in by_key["model.lora.target_modules"].fix
    assert "qwen3 has no experts" in by_key["model.router_aux_loss_coef"].message
    with pytest.raises(ConfigError, match="2 problems"):
        SFTTrainer(config).train()


def test_a_frozen_model_needs_fewer_operations(tmp_path, model_dir, monkeypatch):
    monkeypatch.setattr("burnish.backends.fsdp.backend.FsdpBackend.peak_flops", 1e12)
    shares = []
    for name, keys in (("full", {}), ("lora", lora(model_dir))):
        SFTTrainer(config_of(tmp_path / name, model_dir=model_dir, num_steps=1, **store_data(tmp_path), **keys)).train()
        line = json.loads((Path(tmp_path) / name / "runs" / "sft" / "metrics.jsonl").read_text().splitlines()[0])
        shares.append(line["train/mfu"] * line["timing/step"])
    assert 0.6 < shares[1] / shares[0] < 0.8
