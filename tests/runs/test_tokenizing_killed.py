"""A run that is killed while it tokenizes leaves no process and no store behind, and the next one succeeds."""

import json
import time

import psutil

from tests.runs.commands import burnish, start
from tests.toys import chat, write_jsonl


def test_killed(tmp_path, model_dir):
    rows = write_jsonl(tmp_path / "rows.jsonl", [chat(f"question {i}", "answer " * 9) for i in range(9_000)])
    arguments = ["check", "--json", f"model.path={model_dir}", f"train_datasets={rows}", "num_workers=2"]
    process = start(*arguments, folder=tmp_path)
    deadline = time.monotonic() + 100
    while not list(tmp_path.rglob("*.arrow")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2, "the pool is at work"
    process.kill()
    process.communicate(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
    again = burnish(*arguments, folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["sources"][0]["kept"] == 9_000
