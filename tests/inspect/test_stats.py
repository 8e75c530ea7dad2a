"""The numbers of a store, on the terminal."""

import pytest

from burnish.cli.main import main
from tests.data.stores import write_shard
from tests.data.tokenizing import store
from tests.toys import chat, row, write_jsonl

ROWS = [row(range(1, n + 1), [0] + [1] * (n - 1)) for n in (2, 3, 3, 9)] + [row([1, 2], [1, 0])]


def test_histograms_and_drops_of_a_store(tmp_path, capsys):
    write_shard(tmp_path / "s", 0, ROWS, kind="parquet")
    assert main(["inspect", "stats", str(tmp_path / "s"), "max_length=8"]) == 0
    out = capsys.readouterr().out
    assert "4 of 5 rows, 16 tokens, 12 targets (75.0%)" in out
    assert "dropped no_target: 1" in out
    lines = [line.split() for line in out.splitlines()]
    assert [line[:4] for line in lines if line[1:2] == ["to"]] == [
        *(["2", "to", "3", "3"], ["4", "to", "7", "0"], ["8", "to", "15", "1"]),
        *(["1", "to", "1", "1"], ["2", "to", "3", "2"], ["4", "to", "7", "1"]),
    ]
    assert "tokens a row: mean 4.0, 50% 3, 90% 7, 99% 8, most 8" in out


def test_the_manifest_of_a_store(model_dir, tmp_path, capsys):
    file = write_jsonl(tmp_path / "x.jsonl", [chat("q", "a"), chat("q[", "")])
    assert main(["inspect", "stats", str(store(file, model=model_dir, cache=tmp_path, max_length=64))]) == 0
    out = capsys.readouterr().out
    assert f"dropped empty_reply: 1, such as {file}, line 2: the last assistant turn is empty" in out
    for name, value in (("vocabulary_size", "103"), ("max_length", "64"), ("rows_read", "2")):
        assert [name, value] in [line.split() for line in out.splitlines()]


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "names no store"), (["s", "seed=1"], "is no key of"), (["s", "max_length=x"], "max_length")],
)
def test_wrong_words_are_named(words, said, capsys):
    assert main(["inspect", "stats", *words]) == 2
    assert said in capsys.readouterr().err
