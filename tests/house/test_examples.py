"""The examples and the README hold what they say."""

import importlib
import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from burnish.cli.main import COMMANDS
from tests.house.source import ROOT


def make_data(example, monkeypatch):
    """The module that writes an example's rows."""
    folder = ROOT / "examples" / example
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(f"{example}_make_data", folder / "make_data.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", ["quickstart", "smollm2"])
def test_the_rows_are_those_their_script_writes(example, monkeypatch):
    made = make_data(example, monkeypatch).make()
    folder = ROOT / "examples" / example / "data"
    assert {p.name: p.read_text(encoding="utf-8") for p in folder.iterdir()} == made


def test_the_readme_is_short_and_names_every_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) < 200
    assert [name for name in COMMANDS if f"burnish {name}" not in readme] == []
    assert "make quickstart" in readme
    assert "make test" in readme


def test_the_files_to_read_first_are_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for file in ("train/trainer.py", "data/stream.py", "data/batch.py", "models/loss.py", "data/tokenize.py"):
        assert file in readme
        assert (ROOT / "burnish" / file).is_file()


def test_the_curriculum_goes_from_short_to_long_and_then_anywhere():
    module = importlib.import_module("examples.curriculum.order")
    lengths = np.arange(100) * 37 % 100
    sampler = module.ShortFirst(SimpleNamespace(lengths=lengths), groups=4)
    first, second = (lengths[list(sampler)] for _ in range(2))
    assert [sorted(group) for group in np.split(first, 4)] == np.arange(100).reshape(4, 25).tolist()
    assert sorted(second) == list(range(100))
    assert all(np.ptp(group) > 25 for group in np.split(second, 4))


def test_a_jump_of_the_loss_is_noted_with_its_rows(tmp_path):
    module = importlib.import_module("examples.callbacks.watch")
    noting = module.NoteJumps(tmp_path / "new" / "jumps.jsonl", factor=1.5)
    for step, loss in enumerate((1.0, 1.2, 2.0, 1.0), 1):
        noting.on_step_end(
            SimpleNamespace(step=step),
            None,
            batch=SimpleNamespace(row_numbers=(step, 7)),
            result=SimpleNamespace(loss=loss),
        )
    assert (tmp_path / "new" / "jumps.jsonl").read_text() == '{"step": 3, "loss": 2.0, "rows": [3, 7]}\n'


def test_the_table_of_examples_names_each():
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    scripts = [str(file.relative_to(ROOT)) for file in (ROOT / "examples").rglob("*.sh")]
    assert scripts
    assert [script for script in scripts if f"`{script}`" not in table] == []
    folders = {file.parent.name for file in (ROOT / "examples").glob("*/*.yaml")}
    assert folders
    assert [name for name in folders if f"examples/{name}/" not in table] == []
