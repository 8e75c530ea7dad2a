"""B54: Alpaca rows with nothing where text should be."""

import pytest

from burnish.data.chat import Kind, chat_reader
from burnish.data.rows import open_rows
from burnish.storage.transfer import fetch
from tests.data.tokenizing import encode, load, read, rows_of, store, targets_of, text_of
from tests.toys import chat, write_jsonl, write_parquet

ROW = {"instruction": "Add.", "output": "3"}
NAN = float("nan")


def alpaca(**changes):
    return read({**ROW, **changes}, kind=Kind.ALPACA)


def test_with_input(model_dir):
    tokenizer = load(model_dir)
    example = encode(tokenizer, {**ROW, "input": "1 2"}, kind=Kind.ALPACA)
    assert "user\nAdd.\n\n1 2<|im_end|>" in text_of(tokenizer, example)
    assert targets_of(tokenizer, example) == "3<|im_end|>"


@pytest.mark.parametrize("nothing", [{}, {"input": None}, {"input": ""}, {"input": "   "}, {"input": NAN}])
def test_no_input_in_every_spelling(model_dir, nothing):
    tokenizer = load(model_dir)
    example = encode(tokenizer, {**ROW, **nothing}, kind=Kind.ALPACA)
    assert example.input_ids.tolist() == encode(tokenizer, chat("Add.", "3")).input_ids.tolist()
    assert "None" not in text_of(tokenizer, example)
    assert "nan" not in text_of(tokenizer, example)


@pytest.mark.parametrize("nothing", [None, "", " ", NAN])
def test_no_output_or_no_instruction_is_dropped(nothing):
    assert alpaca(output=nothing).reason == "empty_reply"
    assert alpaca(instruction=nothing).reason == "empty_prompt"


def test_messages_win_where_a_dataset_has_both(model_dir, tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", [ROW, {**ROW, **chat("q", "a")}])
    reader = chat_reader(
        open_rows(str(file), split=None, fetch=fetch), name="x", messages_key=None, tools_key=None, system_key=None
    )
    assert reader.kind is Kind.CHAT
    assert len(rows_of(store(file, model=model_dir, cache=tmp_path))) == 1


def test_from_a_table_with_nulls(model_dir, tmp_path):
    table = store(
        write_parquet(tmp_path / "x.parquet", [{**ROW, "input": None}, {**ROW, "input": "1 2"}]),
        model=model_dir,
        cache=tmp_path,
    )
    lines = store(write_jsonl(tmp_path / "x.jsonl", [ROW, {**ROW, "input": "1 2"}]), model=model_dir, cache=tmp_path)
    assert rows_of(table) == rows_of(lines)
