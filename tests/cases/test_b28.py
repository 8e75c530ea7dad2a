"""B28: what the cache has of another tokenizer, template, setting or file is not used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.config.choices import Truncation
from tests.data.tokenizing import ALL, rows_of, store
from tests.toys import T1, T3, chat, save_tokenizer, write_jsonl

ROWS = [
    {**chat(f"question {i}", f"answer {i}"), "other": chat("x", "y")["messages"], "tool_list": []} for i in range(6)
]
START = """
import json, sys
from pathlib import Path
from tests.data.tokenizing import store
print(store(sys.argv[1], model=Path(sys.argv[2]), cache=Path(sys.argv[3]), max_length=64))
"""


@pytest.fixture
def place(tmp_path):
    save_tokenizer(tmp_path / "model")
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    return tmp_path


def build(place: Path, **changes) -> Path:
    given = {"model": place / "model", "cache": place / "cache", "max_length": 64, **changes}
    return store(place / "rows.jsonl", **given)


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 32},
        {"max_length": None},
        {"truncation": Truncation.DROP},
        {"train_on_what": ALL},
        {"messages_key": "other"},
        {"tools_key": "tool_list"},
        {"system_key": "tool_list"},
        {"split": "train[:3]"},
        {"chat_template": T3},
        {"chat_template_kwargs": {"a": 1}},
    ],
)
def test_each_setting_is_part_of_the_key(place, change):
    first = build(place)
    assert build(place) == first
    assert build(place, **change) != first


def test_an_edited_template_file_and_another_vocabulary(place):
    first = build(place)
    (place / "model" / "chat_template.jinja").write_text(T3)
    second = build(place)
    assert second != first
    assert "D" not in T1
    (place / "model" / "chat_template.jinja").write_text(T1)
    assert build(place) == first
    layout = json.loads((place / "model" / "tokenizer.json").read_text())
    layout["model"]["vocab"]["new"] = len(layout["model"]["vocab"])
    (place / "model" / "tokenizer.json").write_text(json.dumps(layout))
    assert build(place) not in (first, second)


def test_a_file_edited_within_the_same_instant(place):
    first, file = build(place), place / "rows.jsonl"
    stat = file.stat()
    write_jsonl(file, [*ROWS[:5], {**chat("question 5", "answer X"), "other": None, "tool_list": []}])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = build(place)
    assert second != first
    assert rows_of(second)[:5] == rows_of(first)[:5]
    assert rows_of(second)[5] != rows_of(first)[5]


def test_processes_share_one_store(place):
    command = [sys.executable, "-c", START, str(place / "rows.jsonl"), str(place / "model"), str(place / "cache")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=100)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    times = {file: file.stat().st_mtime_ns for file in Path(printed[0]).iterdir()}
    assert printed == [str(build(place))] * 2
    assert {file: file.stat().st_mtime_ns for file in build(place).iterdir()} == times


def test_force_and_disable(place):
    first = build(place)
    forced = build(place, force=True)
    assert forced != first
    assert build(place) == forced
    assert rows_of(forced) == rows_of(first)
    before = sorted(place.rglob("*"))
    private = build(place, disable_cache=True)
    assert rows_of(private) == rows_of(first)
    assert sorted(place.rglob("*")) == before
    assert place not in private.parents
