"""B73: any number of processes gives the same store, and none hangs or hides an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.data import write
from burnish.errors import DataError
from tests.data.tokenizing import manifest_of, rows_of, store
from tests.toys import chat, write_jsonl

ROWS = [chat(f"q{i}", f"a{i}") if i % 5 else chat("q", "") for i in range(30)]
SCRIPT = """
from pathlib import Path
from burnish.data import write
from tests.data.tokenizing import store
write.SHARD_ROWS = (10, 10)
store({rows!r}, model=Path({model!r}), cache=Path({cache!r}), num_workers=2)
"""


@pytest.mark.parametrize("num_workers", [0, 1, 8])
def test_three_rows(model_dir, tmp_path, num_workers):
    file = write_jsonl(tmp_path / "x.jsonl", ROWS[1:4])
    folder = store(file, model=model_dir, cache=tmp_path, num_workers=num_workers)
    assert len(rows_of(folder)) == 3


def test_a_pool_writes_the_same_bytes(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "SHARD_ROWS", (10, 10))
    file = write_jsonl(tmp_path / "x.jsonl", ROWS)
    alone = store(file, model=model_dir, cache=tmp_path / "0", num_workers=0)
    pool = store(file, model=model_dir, cache=tmp_path / "2", num_workers=8)
    assert manifest_of(alone) == manifest_of(pool)
    assert len(manifest_of(alone).checksums) == 3
    assert rows_of(alone) == rows_of(pool)
    assert len(rows_of(alone)) == 24
    assert manifest_of(pool).dropped == {"empty_reply": 6}
    assert manifest_of(pool).drop_examples == {"empty_reply": f"{file}, line 1: the last assistant turn is empty"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_row_is_named(model_dir, tmp_path, monkeypatch, num_workers):
    monkeypatch.setattr(write, "SHARD_ROWS", (10, 10))
    bad = {"messages": [{"content": "no role"}]}
    rows = [*ROWS[:17], bad, *ROWS[18:25], bad, *ROWS[26:]]
    file = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(DataError, match=r"row 17 \(.*x\.jsonl, line 18\): message 0: .*found content"):
        store(file, model=model_dir, cache=tmp_path / "cache", num_workers=num_workers)
    assert [file.name for file in (tmp_path / "cache" / "tokenized").iterdir() if not file.name.endswith(".lock")] == []


def test_a_row_that_no_tokenizer_takes_is_named(model_dir, tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", [*ROWS[1:5], chat("\ud800", "a")])
    with pytest.raises(DataError, match=r"row 4 \(.*line 5\): cannot be tokenized \(\w+: "):
        store(file, model=model_dir, cache=tmp_path)


def test_a_script_without_a_main_guard_is_told(model_dir, tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", ROWS)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(rows=str(file), model=str(model_dir), cache=str(tmp_path / "cache")))
    environment = {**os.environ, "PYTHONPATH": str(Path(write.__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, timeout=100, env=environment
    )
    assert run.returncode == 1
    assert "a process that tokenizes died" in run.stderr
    assert "__name__ == '__main__'" in run.stderr
