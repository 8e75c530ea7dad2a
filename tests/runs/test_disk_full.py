"""A disk that is full when the second checkpoint is written: the first one stays, and the run says why it stops."""

import subprocess
import sys

from tests.runs.commands import environment
from tests.storage.test_transfer import inside_mount
from tests.toys import chat, write_jsonl


def test_the_old_checkpoint_stays(tmp_path, model_dir):
    rows = write_jsonl(tmp_path / "rows.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(8)])
    keys = (f"model.path={model_dir}", f"train_datasets={rows}", "num_workers=0", "num_steps=4", "ckpt_interval=2")
    (tmp_path / "small").mkdir()
    mount = inside_mount(f"mount -t tmpfs -o size=600k none {tmp_path}/small")
    run = [sys.executable, "-m", "burnish", "train", *keys, "ckpt_path=small"]
    inside = ["sh", "-c", '"$@"; status=$?; find small -type f; exit $status', "sh", *run]
    command = ["sh", "-c", f'{mount} "$@"', "sh", *inside]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment(tmp_path)
    )
    assert done.returncode == 2, done.stderr
    assert "small/global_step_4.partial" in done.stderr
    assert "could not be written" in done.stderr
    assert "fix: see that the disk has room" in done.stderr
    assert "Traceback" not in done.stderr
    assert "small/global_step_2/COMPLETE" in done.stdout.split()
    assert "global_step_4" not in done.stdout
