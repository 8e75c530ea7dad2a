import json
import sys

import pytest

from burnish.cli.commands import Request
from burnish.cli.main import COMMANDS, _sorted, main, run
from burnish.config.run import key_names


def test_no_command_shows_them_all(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)


def test_the_command_imports_from_where_it_is_given_and_hides_no_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["burnish", "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match="0"):
        run()
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help(name, capsys):
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: burnish {name}")
    assert all(f"{key}=..." in shown for key in COMMANDS[name].own)


def test_the_help_of_train_lists_every_key(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name}   (" in shown for name in key_names())
    assert "  batch_size   (whole number >= 1; default 4)\n      Examples a step, over all ranks.\n" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "write burnish train"),
        (["report", "runs/a"], "runs/a: there is no such folder"),
        (["report"], "names no run"),
        (["report", "run=a"], "run=a: there is no such folder"),
        (["report", "runs/a", "out=s3://b/x"], "is no local path"),
        (["inspect"], "write burnish inspect rows"),
        (
            ["inspect", "packs", "run.yaml"],
            "inspect='packs': is to be told what to show\n    fix: write burnish inspect rows, step N",
        ),
        (["inspect", "row", "row=3"], "inspect='row': is to be told what to show"),
        (["inspect", "rows", "row=x"], "'x' is not a whole number"),
        (["inspect", "step", "run.yaml"], "'run.yaml' is not a whole number"),
        (["inspect", "step", "3", "row=1", "model.path=m", "train_datasets=d"], "is for burnish inspect rows"),
        (["inspect", "rows", "--json", "model.path=m", "train_datasets=d"], "is for burnish inspect step"),
        (["export"], "CHECKPOINT"),
        (["export", "ckpts/global_step_1"], "out"),
        (["tokenize", "model.path=m", "train_datasets=d"], "write out=..."),
        (["inspect", "rows", "html=s3://b/x", "model.path=m", "train_datasets=d"], "is no local path"),
        (["train", "num_step=5"], "num_steps"),
        (["train", "none.yaml"], "No such file"),
        (["train", "a.yaml", "b.yaml"], "b.yaml"),
        (["train", "--fast"], "unrecognized arguments: --fast"),
        (["train", "model.path=m", "--batch_size=4", "train_datasets=d"], "fix: write batch_size=4"),
        (["inspect", "rows", "row=2", "sample=3", "model.path=m", "train_datasets=d"], "is given beside row=2"),
        (["eval", "model.path=m", "batch_size=x"], "'x' is not a whole number"),
        (["tokenize", "model.path=m", "out=x", "row=3"], "row"),
    ],
)
def test_wrong_input_exits_with_2_and_a_message(words, said, capsys):
    assert main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_three_mistakes_are_named_together(capsys):
    words = ["train", "model.path=m", "num_step=5", "batch_size=0", "pretokenized_dataset_paths=a", "train_datasets=b"]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("config: 3 problems\n")
    assert all(key in shown for key in ("num_steps", "batch_size=0", "pretokenized_dataset_paths"))


@pytest.mark.parametrize("words", [["--json", "num_step=5"], ["num_step=5", "--json"]])
def test_check_prints_one_json_object_also_for_a_config_that_cannot_be_read(words, capsys):
    assert main(["check", *words]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["problems"][1] == {
        "key": "num_step",
        "value": "5",
        "message": "there is no such key",
        "fix": "write num_steps, the nearest key there is",
    }


def test_check_without_json_says_the_same_in_words(capsys):
    assert main(["check", "num_step=5"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, "num_steps" in shown.err) == ("", True)


@pytest.mark.parametrize("value", ["0", "-0.4", "1.01", "40", "nan", "much"])
def test_check_takes_a_share_of_the_operations(value, capsys):
    assert main(["check", "model.path=m", "train_datasets=x", f"mfu={value}"]) == 2
    assert capsys.readouterr().err.startswith("config: 1 problem\n  mfu=")


def test_check_names_the_devices_it_knows(capsys):
    assert main(["check", "model.path=m", "train_datasets=x", "device=h101"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(
        "config: 1 problem\n  device='h101': is no device that is known\n    fix: write one of b200"
    )


def test_the_words_of_a_command_are_sorted():
    words = ["rows", "a/run=1.yaml", "row=3", "num_steps=5", "html=x=y.html"]
    request = _sorted(COMMANDS["inspect"], words, as_json=False)
    assert request == Request(
        first="rows",
        second="a/run=1.yaml",
        overrides=("num_steps=5",),
        own={"row": "3", "html": "x=y.html"},
        as_json=False,
    )
    assert request.whole("row") == 3


def test_a_key_of_another_command_is_not_taken_out():
    request = _sorted(COMMANDS["train"], ["row=3"], as_json=False)
    assert request.overrides == ("row=3",)
