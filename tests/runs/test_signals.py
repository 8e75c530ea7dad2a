"""A run that is told to stop saves; the same command with resume_from=latest goes on as if nothing had been."""

import os
import signal
import time
from threading import Timer

import pytest

from burnish.train.callbacks import Callback
from tests.runs.commands import burnish, metrics, start
from tests.storage.faults import delay
from tests.storage.published import marked, publish
from tests.toys import chat, write_jsonl

STEPS = 60


def wait_for_step(process, folder, step):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        file = folder / "runs" / "sft" / "metrics.jsonl"
        if file.exists() and file.read_text().count("\n") >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[1]}")


@pytest.mark.parametrize(
    ("number", "status", "ranks"), [(signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 2)]
)
def test_stop_and_go_on(tmp_path, model_dir, number, status, ranks):
    """With several ranks the signal reaches their launcher alone."""
    rows = [chat(f"question {i} " + "long " * (i % 7), f"answer {i} " * 9) for i in range(50)]
    arguments = ["train", f"model.path={model_dir}", f"train_datasets={write_jsonl(tmp_path / 'c.jsonl', rows)}"]
    arguments += [f"num_steps={STEPS}", "ckpt_path=ckpt", "batch_size=8", "micro_train_batch_size_per_gpu=8"]
    arguments += [f"placement.num_gpus_per_node={ranks}"]
    (tmp_path / "whole").mkdir()
    whole = burnish(*arguments, folder=tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr

    folder = tmp_path / "parts"
    folder.mkdir()
    process = start(*arguments, folder=folder)
    wait_for_step(process, folder, 5)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert "Traceback" not in err
    stopped = max(metrics(folder))
    assert 5 <= stopped < STEPS
    assert [p.name for p in (folder / "ckpt").iterdir()] == [f"global_step_{stopped}"]
    drawn = f'"x": {list(range(1, stopped + 1))}'
    assert drawn in (folder / "runs" / "sft" / "report.html").read_text(encoding="utf-8")

    again = burnish(*arguments, "resume_from=latest", folder=folder)
    assert again.returncode == 0, again.stderr
    expected, got = metrics(tmp_path / "whole"), metrics(folder)
    assert [got[s]["train/loss"] for s in range(1, STEPS + 1)] == [
        expected[s]["train/loss"] for s in range(1, STEPS + 1)
    ]


class AtItsEnd(Callback):
    """Rank 0 is told to stop in its third step, and rank 1 when it has ended its training and waits for the other."""

    def on_step_end(self, progress, requests, *, batch, result):
        if progress.step == 3 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, progress, requests):
        if os.environ["RANK"] == "1":
            Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            time.sleep(1.5)


def test_a_signal_that_comes_later_to_one_rank_than_to_the_other_breaks_nothing_off(tmp_path, model_dir):
    data = write_jsonl(tmp_path / "c.jsonl", [chat(f"question {i}", f"answer {i}") for i in range(50)])
    arguments = (f"model.path={model_dir}", f"train_datasets={data}", "num_steps=60", "batch_size=8")
    own = ("callbacks=tests.runs.test_signals.AtItsEnd", "placement.num_gpus_per_node=2")
    done = burnish("train", *arguments, *own, folder=tmp_path)
    assert done.returncode == 143, done.stderr
    assert "lost contact" not in done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "INFO stopped by SIGTERM after step 3",
        "INFO report: runs/sft/report.html",
    ]


def test_what_is_private_is_removed_when_the_run_ends_before_its_first_step(
    s3_bucket, faulty, model_dir, tmp_path, monkeypatch
):
    uri = publish(s3_bucket, "tok", [marked(1), marked(2)])
    faulty.on("get", delay(10))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    keys = (f"model.path={model_dir}", f"pretokenized_dataset_paths={uri}", "num_steps=1", "disable_cache=true")
    process = start("train", *keys, folder=tmp_path)
    while not list((tmp_path / "tmp").glob("burnish-private-*/files/objects")):
        time.sleep(0.05)
        assert process.poll() is None
    process.terminate()
    faulty.heal()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert list((tmp_path / "tmp").glob("burnish-*")) == []
