"""Several processes, however they are started: the losses of one, and an end in seconds when one of them dies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.runs.commands import burnish, environment, metrics, start
from tests.toys import chat, write_jsonl

TWO = "placement.num_gpus_per_node=2"
FIRST_OF_JOBS = 10_240
"""The port of job 0."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    content = [chat(f"question {i} " + "long " * (i % 7), f"answer {i} " * 9) for i in range(50)]
    return write_jsonl(tmp_path_factory.mktemp("rows") / "chats.jsonl", content)


@pytest.fixture
def keys(rows, model_dir):
    return (f"model.path={model_dir}", f"train_datasets={rows}", "num_steps=4", "batch_size=8", "num_workers=0")


def as_tasks_of_srun(*arguments: str, folder: Path) -> list[subprocess.CompletedProcess]:
    """The command twice, as srun starts it for two tasks on the host named ``localhost``."""
    (port,) = free_ports(1)
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(port - FIRST_OF_JOBS), "SLURM_STEP_ID": "0"}
    job |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_NODELIST": "otherhost[1-2],localhost"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "burnish", *arguments],
            cwd=folder,
            env=environment(folder) | job | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for task in range(2)
    ]
    results = [process.communicate(timeout=240) for process in processes]
    return [subprocess.CompletedProcess(p.args, p.returncode, *r) for p, r in zip(processes, results, strict=True)]


def under_torchrun(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "burnish"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=environment(folder),
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )


def losses(folder: Path, run_name: str) -> list[float]:
    return [line["train/loss"] for line in metrics(folder, run_name).values()]


def test_two_processes_train_as_one_however_they_are_started(tmp_path, keys):
    started = [
        burnish("train", *keys, "run_name=one", folder=tmp_path),
        burnish("train", *keys, TWO, "run_name=launcher", folder=tmp_path),
        under_torchrun("train", *keys, "run_name=torchrun", folder=tmp_path),
        *as_tasks_of_srun("train", *keys, "run_name=slurm", folder=tmp_path),
    ]
    assert [run.returncode for run in started] == [0] * 5, [run.stderr for run in started]
    expected = losses(tmp_path, "one")
    assert len(expected) == 4
    for name in ("launcher", "torchrun", "slurm"):
        assert (tmp_path / "runs" / name / "report.html").is_file()
        assert losses(tmp_path, name) == pytest.approx(expected, rel=1e-6)
    # Rank 0 speaks, and nothing is said twice.
    assert started[1].stderr.count("effective config") == 1
    *_, last_step, report = started[1].stderr.splitlines()
    assert last_step.startswith("step 4/4")
    assert report == "INFO report: runs/launcher/report.html"


def test_two_processes_evaluate_as_one_and_print_one_object(tmp_path, keys, rows):
    sets = (f"eval_datasets={rows}", "eval_dataset_names=held_out")
    one = burnish("eval", *keys, *sets, "--json", folder=tmp_path)
    two = burnish("eval", *keys, *sets, TWO, "--json", folder=tmp_path)
    ranks = under_torchrun("eval", *keys, *sets, "--json", folder=tmp_path)
    expected = json.loads(one.stdout)
    for run in (two, ranks):
        found = json.loads(run.stdout)["held_out"]
        assert found == pytest.approx(expected["held_out"], rel=1e-6), run.stderr


def test_python_launches_too_without_a_main_guard(tmp_path, keys, rows, model_dir):
    script = f"""
from burnish import SFTConfig, SFTTrainer
config = SFTConfig(model={{"path": {str(model_dir)!r}}}, train_datasets={str(rows)!r}, num_steps=2, num_workers=0,
    placement={{"num_gpus_per_node": 2}}, callbacks=["own.Own"])
print(SFTTrainer(config).train())
"""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.py").write_text(script)
    (tmp_path / "scripts" / "own.py").write_text("from burnish.train.callbacks import Callback as Own\n")
    done = subprocess.run(
        [sys.executable, "scripts/run.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"Progress\(step=2, epoch=0, total_tokens=\d+, bad_steps=0, evaluations=0\)\n", done.stdout)


@pytest.mark.parametrize(
    ("how", "status", "first", "last"),
    [
        ("raise", 1, "rank 1 on .*: Traceback", "ERROR rank 0 lost contact with rank 1"),
        ("kill", 1, "ERROR rank 0 lost contact with rank 1", "ERROR rank 1 was killed by SIGKILL; out of memory?"),
        ("user", 2, "rank 1 on .*: here: is planted", "ERROR rank 0 lost contact with rank 1"),
    ],
)
def test_a_rank_that_dies_ends_the_run_with_its_own_error(tmp_path, keys, how, status, first, last):
    callback = f"callbacks={{tests.runs.failing.Failing: {{how: {how}}}}}"
    done = burnish("train", *keys, TWO, callback, folder=tmp_path)
    assert time.time() - float((tmp_path / "failed").read_text()) < 15
    assert done.returncode == status, done.stderr
    told = done.stderr.split("step 1/4")[1].splitlines()[1:]
    assert re.match(first, told[0]), done.stderr
    assert told[-1] == last
    assert done.stderr.count("Traceback") == (how == "raise")
    assert ("ValueError: planted" in told) == (how == "raise")


def test_a_dead_rank_is_noticed_by_those_that_wait_outside_a_collective(tmp_path, keys):
    """Under srun nobody watches over the ranks."""
    callback = "callbacks={tests.runs.failing.Failing: {how: kill}}"
    first, second = as_tasks_of_srun("train", *keys, callback, folder=tmp_path)
    assert time.time() - float((tmp_path / "failed").read_text()) < 15
    assert (first.returncode, second.returncode) == (1, -signal.SIGKILL)
    assert first.stderr.splitlines()[-1] == "ERROR rank 0 lost contact with rank 1"
    assert "Traceback" not in first.stderr


def test_what_all_ranks_find_wrong_is_said_once(tmp_path, keys):
    done = under_torchrun("train", *keys, "num_stepz=3", folder=tmp_path)
    assert re.findall(".*num_stepz.*", done.stderr) == ["  num_stepz='3': there is no such key"], done.stderr
    done = burnish("train", *keys[:1], TWO, "train_datasets=missing.jsonl", folder=tmp_path)
    assert done.returncode == 2
    assert re.findall(r"(rank \d).*missing.jsonl: ", done.stderr) in (["rank 0"], ["rank 1"]), done.stderr
    assert "Traceback" not in done.stderr


def test_time_to_save_is_bounded(tmp_path, keys):
    callback = "callbacks={tests.runs.failing.Failing: {how: hang}}"
    process = start("train", *keys, TWO, callback, "shutdown_grace_seconds=2", folder=tmp_path)
    while not (tmp_path / "failed").exists():
        time.sleep(0.05)
        assert process.poll() is None
    process.terminate()
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert 2 <= time.monotonic() - began < 10
    assert process.returncode == 143
    assert "ERROR not saved within 2 seconds: the ranks are killed" in err.splitlines()


def test_no_rank_outlives_its_launcher(tmp_path, keys):
    process = start("train", *keys[:2], TWO, "num_steps=100000", "num_workers=0", folder=tmp_path)
    file = tmp_path / "runs" / "sft" / "metrics.jsonl"
    while not file.exists() or not file.read_text():
        time.sleep(0.05)
        assert process.poll() is None
    process.kill()
    process.communicate()  # ends when the last rank closes the pipes
    steps = len(file.read_text().splitlines())
    time.sleep(1)
    assert len(file.read_text().splitlines()) == steps


def test_a_port_in_use_is_named(tmp_path, keys):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        done = subprocess.run(
            [sys.executable, "-m", "burnish", "train", *keys],
            cwd=tmp_path,
            env=os.environ | environment(tmp_path) | place,
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert f"MASTER_PORT={place['MASTER_PORT']} is in use" in done.stderr
    assert "Traceback" not in done.stderr
