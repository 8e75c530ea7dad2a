"""Plain lines are read by a faster parser; it may never be noticed but by the clock."""

import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from burnish.data.jsonl import read_jsonl
from burnish.errors import DataError

VALUES = st.one_of(
    st.integers(-3, 300).map(str),
    st.sampled_from(["1.0", "-0", "-0.0", "1e2", "01", "+1", "", "true", "null", '"1"', "NaN", "[1]", "[]", "{}"]),
    st.sampled_from([str(2**63 - 1), str(2**63), str(-(2**63)), str(-(2**63) - 1), str(2**64), "9" * 40]),
)
LISTS = st.one_of(
    st.lists(st.integers(0, 9).map(str), max_size=6).map(lambda each: f"[{', '.join(each)}]"),
    st.lists(VALUES, max_size=3).map(lambda each: f"[{','.join(each)}]"),
    VALUES,
)
KEYS = st.one_of(
    st.sampled_from(["input_ids", "loss_mask"]),
    st.sampled_from(["attention_mask", "pixel_values", "labels", "t", "input\\u005fids", "input_ids\\u0000"]),
    st.sampled_from(["t\\ud800", "a [b"]),
)
ENTRIES = st.lists(st.tuples(KEYS, LISTS), max_size=4).map(lambda pairs: [f'"{key}": {value}' for key, value in pairs])
PLAIN = st.tuples(LISTS, LISTS).map(lambda both: [f'"input_ids": {both[0]}', f'"loss_mask": {both[1]}'])
LINES = st.builds(
    lambda entries, start, end: f"{start}{{{', '.join(entries)}}}{end}",
    st.one_of(PLAIN, st.builds(lambda a, b: a + b, PLAIN, ENTRIES), ENTRIES),
    st.sampled_from(["", " ", "\t", "\ufeff", "\u00a0", "5"]),
    st.sampled_from(["", "\r", " ", "}", "{}", "\0", ","]),
)


def what_is_read(file):
    try:
        return [batch.to_pylist() for batch in read_jsonl(file)]
    except DataError as error:
        return str(error)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, min_size=1, max_size=3))
@example(lines=['{"input_ids": [[1], [2]], "loss_mask": 0}'])
@example(lines=['{"input_ids": [1, [2]], "loss_mask": null}'])
@example(lines=['{"input_ids": [9], "input_ids": [1], "loss_mask": [1]}'])
@example(lines=['{"input_ids": [1, 2], "loss_mask": [0, 1], "t": "\\ud800"}'])
def test_both_parsers_say_the_same(tmp_path, lines):
    file = tmp_path / "a.jsonl"
    file.write_bytes("\n".join(lines).encode())
    fast = what_is_read(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "simdjson", None)
        assert what_is_read(file) == fast


def test_plain_rows_are_never_read_twice(tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.data.jsonl._read_row", lambda line, place: pytest.fail("the slow parser was asked"))
    text = '{"meta": {"a": null}, "loss_mask": [0, 1], "input_ids":[1,2], "t": "x"}\r\n\n'
    (tmp_path / "a.jsonl").write_text(text * 3)
    (batch,) = what_is_read(tmp_path / "a.jsonl")
    assert [(row["input_ids"], row["loss_mask"]) for row in batch] == [([1, 2], [0, 1])] * 3


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("in_array", [False, True])
def test_what_nests_too_deeply_is_named(tmp_path, opening, in_array):
    row = '{"input_ids": [1, 2], "loss_mask": [0, 1]}'
    deep = '{"input_ids": [1, 2], "loss_mask": [0, 1], "t": ' + opening * 100_000
    (tmp_path / "a.jsonl").write_text(f"[{row},\n{deep}" if in_array else f"{row}\n{deep}\n")
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: is no JSON \(maximum recursion depth exceeded"):
        list(read_jsonl(tmp_path / "a.jsonl"))
