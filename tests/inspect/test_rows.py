"""Rows are shown with what is trained, with control tokens told apart, and at their places in the dataset."""

import pytest

from burnish.config import SFTConfig
from burnish.errors import DataError
from burnish.inspect.rows import show_rows
from tests.toys import chat, row, write_jsonl

ROWS = [chat("q", "a"), chat("q", ""), chat("first", "<b>1"), chat("second", "2"), {"messages": []}]


@pytest.fixture
def config(model_dir, tmp_path):
    def make(rows=ROWS, **more):
        file = tmp_path / "x.jsonl"
        file.write_text("\n")  # a blank line is no row
        with file.open("a") as lines:
            lines.write(write_jsonl(tmp_path / "y", rows).read_text())
        return SFTConfig(model={"path": str(model_dir)}, train_datasets=[str(file)], num_workers=0, **more)

    return make


def shown(config, capsys, **which):
    show_rows(config, **{"row": None, "sample": None, "html": None, **which})
    return capsys.readouterr().out


def test_places_are_those_of_the_dataset(config, capsys, tmp_path):
    printed = shown(config(), capsys)
    assert f"row 0: {tmp_path / 'x.jsonl'}, line 2, " in printed
    assert f"row 1: {tmp_path / 'x.jsonl'}, line 4, " in printed
    assert f"row 2: {tmp_path / 'x.jsonl'}, line 5, " in printed
    only = shown(config(train_dataset_splits=["train[2:]"]), capsys, row=1)
    assert f"row 1: {tmp_path / 'x.jsonl'}, line 5, " in only


def test_targets_and_what_was_dropped(config, capsys, tmp_path):
    printed = shown(config(), capsys, row=2)
    assert "<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>⟧\n" in printed
    assert "1 rows dropped as empty_reply, such as" in printed
    assert f"1 rows dropped as no_assistant, such as {tmp_path / 'x.jsonl'}, line 6: messages is empty" in printed


def test_notices_are_shown(config, capsys):
    rows = [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}]
    assert "from/value (ShareGPT) are read as role/content" in shown(config(rows), capsys)


def test_a_page(config, capsys, tmp_path):
    assert shown(config(), capsys, row=1, html=tmp_path / "page.html") == ""
    page = (tmp_path / "page.html").read_text()
    assert "assistant\n<mark>&lt;b&gt;1<b>&lt;|im_end|&gt;</b></mark>" in page
    assert "<p>" in page
    assert "dropped as empty_reply" in page


def test_a_store_keeps_its_own_places(model_dir, tmp_path, capsys):
    file = write_jsonl(tmp_path / "store.jsonl", [row([4, 5], [0, 1])])
    config = SFTConfig(model={"path": str(model_dir)}, pretokenized_dataset_paths=[str(file)])
    assert f"row 0: {file}, row 0, 2 tokens, 1 targets" in shown(config, capsys)


def test_no_such_row(config, capsys):
    with pytest.raises(DataError, match="there is no row 3"):
        shown(config(), capsys, row=3)
