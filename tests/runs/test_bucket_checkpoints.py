"""The real command line with checkpoints in a bucket alone: killed in an upload, continued, evaluated, exported."""

import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from burnish.api import evaluate, export
from burnish.config import SFTConfig
from burnish.train.checkpoint import complete_checkpoints
from tests.runs.commands import burnish, metrics, start
from tests.storage.faults import after, answer
from tests.toys import chat, write_jsonl


@pytest.fixture
def keys(tmp_path, model_dir, s3_bucket):
    s3_bucket.put("before", b"this server makes a bucket with its first object")
    rows = write_jsonl(
        tmp_path / "rows.jsonl", [chat(f"question {n}", f"answer {n} " * (n % 5 + 1)) for n in range(16)]
    )
    return (f"model.path={model_dir}", f"train_datasets={rows}", "num_workers=0", "num_steps=6")


def train(folder, *keys):
    done = burnish("train", *keys, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr


def losses(folder):
    return {step: line["train/loss"] for step, line in metrics(folder).items()}


def test_killed_in_an_upload_and_continued_here_and_from_an_empty_machine(s3_bucket, faulty, tmp_path, keys):
    for name in ("whole", "here", "elsewhere"):
        (tmp_path / name).mkdir()
    train(tmp_path / "whole", *keys)
    uri, exports = s3_bucket.uri("ck"), s3_bucket.uri("out")
    keys = (*keys, f"ckpt_path={uri}", "ckpt_interval=2")

    released = threading.Event()
    faulty.on("put", after(released.wait), where=lambda request: request.key == "ck/global_step_4/state.json")
    process = start("train", *keys, folder=tmp_path / "here")
    while not any(request.key == "ck/global_step_4/state.json" for request in faulty.requests):
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    faulty.heal()
    released.set()
    assert list(complete_checkpoints(uri)) == [2]

    keys = (*keys, "resume_from=latest", f"export_path={exports}", "hf_save_interval=6")
    err = train(tmp_path / "elsewhere", *keys, "num_steps=3")
    assert f"{uri}: not complete, passed over: global_step_4" in err
    assert "resumed after step 2 of 3" in err
    err = train(tmp_path / "here", *keys)
    assert f"{uri}/global_step_4: going on with its upload" in err
    assert "resumed after step 4 of 6" in err
    assert sorted(complete_checkpoints(uri)) == [2, 3, 4, 6]
    assert losses(tmp_path / "here") == losses(tmp_path / "whole")
    assert losses(tmp_path / "elsewhere")[3] == losses(tmp_path / "whole")[3]
    assert not [path for path in tmp_path.glob("*/cache/checkpoints/**/*") if path.is_file()]

    export(f"{uri}/global_step_6", out=tmp_path / "exported")
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    (tmp_path / "sent.safetensors").write_bytes(s3_bucket.get("out/global_step_6/model.safetensors"))
    sent = load_file(tmp_path / "sent.safetensors")
    assert weights.keys() == sent.keys()
    assert all(torch.equal(weights[name], sent[name]) for name in weights)
    assert "out/global_step_6/config.json" in s3_bucket.keys("out")
    settings = {"model": {"path": keys[0].partition("=")[2]}, "eval_datasets": str(tmp_path / "rows.jsonl")}
    of_model, of_checkpoint = (
        evaluate(SFTConfig(**settings, resume_from=place, num_workers=0))["rows.jsonl"]
        for place in ("", f"{uri}/global_step_6")
    )
    assert of_checkpoint["loss"] < of_model["loss"]


def test_a_bucket_that_takes_nothing_is_named_before_the_model_is_loaded(s3_bucket, faulty, keys, tmp_path):
    faulty.on("put", answer(403, "AccessDenied"))
    done = burnish("train", *keys, f"ckpt_path={s3_bucket.uri('ck')}", "hf_save_interval=3", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("access is denied (403 AccessDenied)") == 2, "of checkpoints and of exports"
    assert "let these credentials write to the bucket" in done.stderr
