"""The real command line, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"BURNISH_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def start(*arguments: str, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "burnish", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment(folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def burnish(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a command in ``folder`` to its end; never longer than four minutes."""
    process = start(*arguments, folder=folder)
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def metrics(folder: Path, run_name: str = "sft") -> dict[int, dict]:
    """Metrics by step; of a step that stands twice, the last line."""
    lines = (folder / "runs" / run_name / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}
