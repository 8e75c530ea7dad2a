"""The house's rules for source: sizes, names, floors, nothing unfinished."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import (
    FILES,
    PACKAGE,
    ROOT,
    free_unpickling,
    functions,
    num_code_lines,
    num_lines,
    parsed,
    unfinished,
)

_MAX_FILE, _MAX_FUNCTION, _MAX_CODE = 400, 50, 14_500
_NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers", "tools"}


def test_no_file_is_long():
    sizes = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: size for name, size in sizes.items() if size > _MAX_FILE} == {}
    assert sum(map(num_code_lines, FILES)) <= _MAX_CODE


def test_no_function_is_long():
    sizes = {f"{file.relative_to(ROOT)}:{f.name}": num_lines(f) for file in FILES for f in functions(file)}
    assert {name: size for name, size in sizes.items() if size > _MAX_FUNCTION} == {}


def test_every_name_says_what_is_in_the_file():
    parts = {part for file in FILES for part in file.relative_to(PACKAGE).with_suffix("").parts}
    assert parts & _NAMES_THAT_SAY_NOTHING == set()


def test_nothing_is_left_undone():
    found = {str(file.relative_to(ROOT)): unfinished(file.read_text()) for file in FILES}
    assert {name: words for name, words in found.items() if words} == {}


def test_every_module_says_what_it_does():
    assert [str(file) for file in FILES if not ast.get_docstring(parsed(file))] == []


def test_nothing_is_unpickled_freely():
    found = {str(file.relative_to(ROOT)): free_unpickling(file.read_text()) for file in FILES}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("pickle.load(f)", ["pickle.load(f)"]),
        ("torch.load(f)", ["torch.load(f)"]),
        ("torch.load(f, weights_only=False)", ["torch.load(f, weights_only=False)"]),
        ("torch.load(f, weights_only=True)", []),
    ],
)
def test_the_search_for_free_unpickling_finds_it(source, found):
    assert free_unpickling(source) == found


def test_the_floors_stand():
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("source", "found"),
    [("# TODO: later", ["TODO"]), ("raise NotImplementedError", ["NotImplementedError"]), ("todos = 1", [])],
)
def test_the_search_for_unfinished_work_finds_it(source, found):
    assert unfinished(source) == found
