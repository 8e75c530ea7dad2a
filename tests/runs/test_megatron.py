"""Megatron through the real command line: the losses of FSDP, checkpoints that go on in another cut, exports.

With BURNISH_MEGATRON=all (``make test-megatron``) also of a model whose head is not its embedding.
"""

import json
import os
import signal
import subprocess
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runs.commands import burnish, metrics, start
from tests.runs.test_ranks import under_torchrun
from tests.toys import chat, save_model, write_jsonl

ON_CPU = ("strategy=megatron", "megatron_config.cpu=true")
TP2, PP2 = "megatron_config.tensor_model_parallel_size=2", "megatron_config.pipeline_model_parallel_size=2"
PACKED = ("use_sequence_packing=true", "max_length=256")
STEPS = 16
KINDS = ("tied", "untied") if os.environ.get("BURNISH_MEGATRON") == "all" else ("tied",)


def processes(number: int) -> str:
    return f"placement.num_gpus_per_node={number}"


def ended_well(done: subprocess.CompletedProcess) -> str:
    """What was said on stderr."""
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def keys_of(tmp_path_factory):
    """The keys of a run of a model, by its kind. Its vocabulary has to be filled up to be shared by two."""
    folder = tmp_path_factory.mktemp("inputs")
    sources = [
        write_jsonl(
            folder / f"{name}.jsonl", [chat(f"{name} {i} " + "long " * (i % 7), f"{i} " * 9) for i in range(16)]
        )
        for name in ("first", "second")
    ]
    held_out = write_jsonl(folder / "held.jsonl", [chat(f"held out {i}", f"answer {i}") for i in range(6)])
    models = {kind: save_model(folder / kind, tied=kind == "tied", vocabulary=131) for kind in KINDS}
    keys = (
        f"train_datasets=[{','.join(map(str, sources))}]",
        f"eval_datasets={held_out}",
        "eval_dataset_names=held",
        "eval_interval=2",
        "batch_size=8",
        "num_workers=0",
        "optimizer_config.lr=1e-3",
        "optimizer_config.eps=1e-6",
    )
    return {kind: (f"model.path={model}", *keys) for kind, model in models.items()}


@pytest.fixture(scope="module")
def of_fsdp(tmp_path_factory, keys_of):
    """(folder, metrics by step) of the run of each kind that the others are compared with; a checkpoint lies in ckpt."""
    found = {}
    for kind, keys in keys_of.items():
        folder = tmp_path_factory.mktemp(kind)
        ended_well(burnish("train", *keys, f"num_steps={STEPS}", "ckpt_path=ckpt", folder=folder))
        found[kind] = folder, metrics(folder)
    return found


def require_same(found, expected):
    """The losses, by source and of the evaluation, and the norm of each step; by number of the step."""
    assert found
    for step, line in found.items():
        kept = {k: v for k, v in expected[step].items() if "loss" in k or k in ("train/grad_norm", "train/num_targets")}
        assert {key: line[key] for key in kept} == pytest.approx(kept, rel=1e-5), step


def logits_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(3, 63)[None]).logits


@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_of_two_ranks_train_packed_rows_as_fsdp_and_what_they_save_serves_one(
    tmp_path, keys_of, of_fsdp, kind
):
    keys, (other, expected) = keys_of[kind], of_fsdp[kind]
    saving = ("num_steps=4", "ckpt_path=ckpt", "hf_save_interval=4")
    said = ended_well(burnish("train", *keys, *ON_CPU, *PACKED, processes(4), TP2, PP2, *saving, folder=tmp_path))
    assert said.count("runs on a stand-in for a GPU") == 1
    assert list(metrics(tmp_path)) == [1, 2, 3, 4]
    require_same(metrics(tmp_path), expected)
    assert {"train/loss/first.jsonl", "train/loss/second.jsonl"} < metrics(tmp_path)[1].keys()

    checkpoint = tmp_path / "ckpt" / "global_step_4"
    ended_well(burnish("export", str(checkpoint), "out=exported", folder=tmp_path))
    own = logits_of(tmp_path / "ckpt" / "hf_exports" / "global_step_4")
    assert torch.equal(logits_of(tmp_path / "exported"), own)
    assert not torch.allclose(own, logits_of(keys[0].removeprefix("model.path=")), atol=1e-2), "it was trained"

    evaluated = burnish("eval", *keys, *ON_CPU, f"resume_from={checkpoint}", "--json", folder=tmp_path)
    ended_well(evaluated)
    assert json.loads(evaluated.stdout)["held"]["loss"] == pytest.approx(expected[4]["eval/held/loss"], rel=1e-5)

    for words, where in (((), checkpoint), (ON_CPU, other / "ckpt" / f"global_step_{STEPS}")):
        done = burnish("train", *keys, *words, "num_steps=20", f"resume_from={where}", folder=tmp_path)
        names = ("megatron", "fsdp") if not words else ("fsdp", "megatron")
        assert done.returncode == 2, done.stderr
        assert "written by strategy={}, and this run has strategy={}\n".format(*names) in done.stderr
        assert f"burnish export {where} out=DIR, and model.path=DIR" in done.stderr
        assert "Traceback" not in done.stderr


def test_stopped_and_gone_on_from_a_bucket_in_another_cut_under_torchrun(tmp_path, keys_of, of_fsdp, s3_bucket):
    s3_bucket.put("before", b"this server makes a bucket with its first object")
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    uri = s3_bucket.uri("ck")
    keys = (*keys_of["tied"], *ON_CPU, f"num_steps={STEPS}", f"ckpt_path={uri}")
    process = start("train", *keys, processes(2), PP2, folder=here)
    file = here / "runs" / "sft" / "metrics.jsonl"
    while not file.exists() or file.read_text().count("\n") < 3:
        time.sleep(0.02)
        assert process.poll() is None, process.communicate()[1]
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    stopped = max(metrics(here))
    assert 3 <= stopped < STEPS

    sizes = (TP2, "megatron_config.sequence_parallel_size=2")
    said = ended_well(under_torchrun("train", *keys, *sizes, "resume_from=latest", folder=elsewhere))
    assert f"resumed after step {stopped} of {STEPS}" in said
    whole = metrics(here) | metrics(elsewhere)
    assert list(whole) == list(range(1, STEPS + 1))
    require_same(whole, of_fsdp["tied"][1])


def test_sizes_that_do_not_fit_are_refused_before_anything_starts(tmp_path, keys_of):
    sizes = (processes(4), "megatron_config.tensor_model_parallel_size=3")
    for command in ("train", "check"):
        done = burnish(command, *keys_of["tied"], *ON_CPU, *sizes, "model.lora.rank=8", folder=tmp_path)
        assert done.returncode == 2
        assert "tensor 3 * pipeline 1 * context 1 does not divide 4 processes" in done.stderr
        assert "model.lora.rank=8: LoRA is not built for strategy=megatron" in done.stderr
        assert "effective config" not in done.stderr
    assert not (tmp_path / "runs").exists()
