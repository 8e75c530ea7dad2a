import os
import subprocess
import sys

from tests.data.judge import save_bytes_tokenizer
from tests.data.tokenizing import CHATML
from tests.house.source import ROOT


def test_it_measures_each_way_and_prints_a_table(tmp_path):
    tokenizer = save_bytes_tokenizer(tmp_path / "tokenizer", CHATML)
    given = ["megabytes=0.1", "times=0", f"tokenizer={tokenizer}", "ways=usual;Burnish"]
    (tmp_path / "own").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "own")}
    command = [sys.executable, ROOT / "benchmarks" / "masks.py", *given]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    head, columns, *lines = run.stdout.splitlines()
    assert head.endswith("where there are fewer")
    assert columns.split("  ")[-1] == "MB, fewer"
    cells = {line.split()[0]: [float(cell) for cell in line.split()[1:]] for line in lines}
    assert list(cells) == ["usual", "Burnish"]
    assert cells["usual"][1] == 1
    assert all(min(numbers) > 0 for numbers in cells.values())
    assert not list((tmp_path / "own").glob("tmp*"))
