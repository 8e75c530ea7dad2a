"""The documentation is generated, whole and current; the examples are right."""

import os
import re
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from burnish import errors
from burnish.cli.main import COMMANDS
from burnish.config import SFTConfig, find_problems, load_config
from burnish.config.docs import config_page, errors_page, key_groups
from burnish.config.run import key_names
from burnish.config.section import keys_of
from tests.house.pages import PAGES, inline
from tests.house.source import ROOT

_DATA = ("facts.yaml",)
"""Files under examples/ that are no RUN.yaml."""
_SCRIPTS = sorted((ROOT / "examples").rglob("*.sh"))
_EXAMPLES = [file for file in sorted((ROOT / "examples").rglob("*.y*ml")) if file.name not in _DATA]


def test_every_key_has_a_sentence():
    sentences = {name: field.description or "" for name, field in keys_of(SFTConfig).items()}
    wrong = {name for name, text in sentences.items() if not text.endswith(".") or "\n" in text or text[0].islower()}
    assert wrong == set()


def test_every_key_is_in_a_group_once():
    shown = [key.name for _, keys in key_groups() for key in keys]
    assert sorted(shown) == sorted(key_names())


def test_the_page_of_keys_is_current():
    assert (ROOT / "docs/config.md").read_text(encoding="utf-8") == config_page(), "run make docs"
    assert all(f"| `{name}` |" in config_page() for name in key_names())


def test_the_page_of_errors_is_current():
    assert (ROOT / "docs/errors.md").read_text(encoding="utf-8") == errors_page(), "run make docs"
    classes = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(classes) >= 6
    assert all(f"| `{name}` |" in errors_page() for name in classes)


@pytest.mark.parametrize("file", _EXAMPLES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_example_is_right(file):
    assert find_problems(load_config(file), environment={}) == []


@pytest.mark.parametrize("file", _SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_script_starts_a_run_that_is_right_and_can_be_overridden(file, tmp_path):
    shown = tmp_path / "burnish"
    shown.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    shown.chmod(0o755)
    paths = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given = ["num_steps=20", "batch_size=8", "batch_tokens=null"]
    said = subprocess.run(["bash", file, *given], env=paths, capture_output=True, check=True)
    command, *words, _ = said.stdout.decode().split("\0")
    run = Path(words.pop(0)) if words[0].endswith(".yaml") else None
    config = load_config(run, words)
    assert command == "train"
    assert find_problems(config, environment={}) == []
    assert (config.num_steps, config.batch_size) == (20, 8)


def test_there_are_examples():
    assert _EXAMPLES
    assert _SCRIPTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page):
    """Commands, modules, targets, extras and files between backticks; tests and benchmarks in links are the site's matter."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for text in inline(page):
        first, *rest = text.split()
        if first == "burnish" and rest:
            assert rest[0] in {*COMMANDS, "..."}, text
        elif text.startswith("python -m "):
            assert find_spec(rest[1]), text
        elif first == "make" and rest:
            assert rest[0] in targets, text
        elif text.startswith("pip install 'burnish["):
            assert set(text.split("[")[1].split("]")[0].split(",")) <= extras.keys(), text
        elif re.fullmatch(r"(tests|examples|benchmarks)/[\w/.]+", text):
            assert (ROOT / text).exists(), text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_first_what_it_gives(page):
    title, blank, lead = page.read_text(encoding="utf-8").splitlines()[:3]
    assert title.startswith("# ")
    assert blank == ""
    assert len(lead) > 40
    assert lead[0].isalnum() or lead[0] == "`"
