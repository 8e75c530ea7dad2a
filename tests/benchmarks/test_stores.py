import os
import re
import subprocess
import sys

from tests.house.source import ROOT


def test_it_measures_both_sides_and_prints_a_table(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "stores.py", "rows=80", "formats=jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    head, rule, *lines = run.stdout.splitlines()
    assert head == "| 80 rows | usual way | datasets alone | Burnish | times |"
    assert re.fullmatch(r"[| :-]+", rule)
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in lines}
    names = ["open, first, cpu s", "open, first, wall s", "open, again, cpu s", "open, again, wall s"]
    names += ["64 random rows, ms", "memory, rows let go, MB", "memory, rows kept, MB"]
    assert [name for name in cells if "Arrow" not in name] == [f"JSON lines: {name}" for name in names]
    assert sum("a plain pass, and the check" in name for name in cells) == 2
    for name in names[1::2] + names[4:]:
        assert min(float(cell) for cell in cells[f"JSON lines: {name}"] if cell) > 0
    assert not list(tmp_path.iterdir())
