"""A run on two ranks is killed at random, again and again; what is left at its end equals a run that nobody touched.

The store and the checkpoints lie in a bucket. A moment is drawn, and with it the launcher or one of its ranks; SIGKILL ends
it, and the rest has to end by itself. Every third moment is one of the start, which takes as long as the machine needs, all
others are steps, so far ahead that the last kill, not the first, comes near the end. ``make test-chaos`` kills 20 times.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from tests.runs.commands import environment, metrics
from tests.storage.published import publish
from tests.toys import row

KILLS = int(os.environ.get("CHAOS_KILLS", "3"))
STEPS, INTERVAL, SECONDS_A_STEP = 60, 4, 0.1
END_SECONDS = 15
"""A run of which one process is dead ends within these. The report has the real ones."""
SLOW = f"""
import os
import time
from burnish.train.callbacks import Callback

class Slow(Callback):
    def on_step_begin(self, progress, requests):
        if os.environ["RANK"] == "0":
            with open("begun", "a") as file:
                file.write(".")
        time.sleep({SECONDS_A_STEP})
"""


def words(model_dir: Path, store: str, checkpoints: str) -> list[str]:
    keys = {
        "model.path": model_dir,
        "pretokenized_dataset_paths": store,
        "ckpt_path": checkpoints,
        "ckpt_interval": INTERVAL,
        "max_ckpts_to_keep": 2,
        "export_path": "exports",
        "hf_save_interval": 1000,
        "resume_from": "latest",
        "num_steps": STEPS,
        "placement.num_gpus_per_node": 2,
        "optimizer_config.lr": 1e-3,
        "callbacks": "slow.Slow",
    }
    return [sys.executable, "-m", "burnish", "train", *(f"{key}={value}" for key, value in keys.items())]


def begin(command: list[str], folder: Path, log: Path) -> psutil.Popen:
    with log.open("w") as stream:
        return psutil.Popen(command, cwd=folder, env=environment(folder), stdout=stream, stderr=subprocess.STDOUT)


def complete_steps(bucket) -> list[int]:
    keys = [key for key in bucket.keys("ck") if key.endswith("/COMPLETE")]
    return sorted(int(key.split("/")[-2].removeprefix("global_step_")) for key in keys)


def kill_one(process: psutil.Popen, chance: random.Random) -> str:
    """SIGKILL the launcher or a rank; the rest of them is gone soon after. Returns who it was."""
    family = [process, *process.children(recursive=True)]
    ranks = [p for p in family if "RANK" in _variables(p)]
    victim = chance.choice([process, *ranks])
    who = f"rank {_variables(victim)['RANK']}" if victim in ranks else "the launcher"
    with suppress(psutil.NoSuchProcess):
        victim.send_signal(signal.SIGKILL)
    process.wait(timeout=END_SECONDS)
    _, alive = psutil.wait_procs(family, timeout=END_SECONDS)
    assert not alive, f"{who} was killed, and {len(alive)} processes went on"
    return who


def _variables(process: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error):
        return process.environ()
    return {}


def steps_begun(folder: Path) -> int:
    """Steps that the run has begun, in all its starts."""
    file = folder / "begun"
    return len(file.read_text()) if file.exists() else 0


def wait_for(process: psutil.Popen, folder: Path, *, steps: int, seconds: float) -> None:
    """Return when the run has begun so many more ``steps``, or when so many ``seconds`` are over, or it has ended."""
    until, goal = time.monotonic() + seconds, steps_begun(folder) + steps
    while process.poll() is None and time.monotonic() < until and steps_begun(folder) < goal:
        time.sleep(0.01)


def test_killed_at_random(s3_bucket, model_dir, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    shards = [[row([5 + n, 6, 7 + s, *range(8, 8 + n)], [0, 1, 1, *[1] * n]) for n in range(20)] for s in range(3)]
    store = publish(s3_bucket, "tok", shards)
    began = time.monotonic()
    untouched = begin(words(model_dir, store, "checkpoints"), tmp_path, tmp_path / "untouched.log")
    wait_for(untouched, tmp_path, steps=1, seconds=300)
    starting = time.monotonic() - began
    assert untouched.wait(timeout=300) == 0, (tmp_path / "untouched.log").read_text()
    (tmp_path / "exports").rename(tmp_path / "wanted")
    wanted = metrics(tmp_path)

    seed = int(os.environ.get("CHAOS_SEED", "0"))
    chance, report, command = random.Random(seed), [], words(model_dir, store, s3_bucket.uri("ck"))
    newest = reached = 0
    for number in range(KILLS):
        log, begun = tmp_path / f"{number}.log", steps_begun(tmp_path)
        process = begin(command, tmp_path, log)
        if number % 3 == 2:
            seconds, ahead = chance.uniform(0.1, 1) * starting, 1
            moment = f"{seconds:.1f} s"
        else:
            left = STEPS - INTERVAL - reached  # a run that has saved its last step would end before it is killed
            seconds, ahead = 120, chance.randint(1, max(1, 2 * left // (KILLS - number + 1)))
            moment = f"{ahead} steps"
        wait_for(process, tmp_path, steps=ahead, seconds=seconds)
        time.sleep(chance.uniform(0, SECONDS_A_STEP))
        assert process.poll() is None, log.read_text()
        before = complete_steps(s3_bucket)
        killed = time.monotonic()
        who = kill_one(process, chance)
        ended = time.monotonic() - killed
        text = log.read_text()
        resumed = int(found[1]) if (found := re.search(r"resumed after step (\d+) of", text)) else None
        assert resumed is None or resumed >= newest, "no more is lost than what no checkpoint holds"
        if steps_begun(tmp_path) > begun:
            reached = (resumed or 0) + steps_begun(tmp_path) - begun
        after = complete_steps(s3_bucket)
        assert set(before[-1:]) <= set(after), "the newest complete checkpoint stays"
        newest = max(after, default=0)
        report.append(f"{number}: {who} after {moment}, ended in {ended:.1f} s; complete: {after}")
    process = begin(command, tmp_path, tmp_path / "last.log")
    assert process.wait(timeout=300) == 0, (tmp_path / "last.log").read_text()
    print("\n".join(["", f"{KILLS} kills, seed {seed}, of a run of {STEPS} steps:", *report]))

    got = metrics(tmp_path)
    for step in range(1, STEPS + 1):
        assert got[step]["train/loss"] == wanted[step]["train/loss"], step
    weights = [
        load_file(tmp_path / name / f"global_step_{STEPS}" / "model.safetensors") for name in ("wanted", "exports")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert complete_steps(s3_bucket) == [STEPS - INTERVAL, STEPS]
