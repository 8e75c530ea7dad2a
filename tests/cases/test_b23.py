"""B23: tool call arguments as an object or as its JSON text give the same tokens."""

import pytest

from burnish.errors import DataError
from tests.data.tokenizing import encode, load, read, rows_of, store, targets_of
from tests.toys import save_tokenizer, write_jsonl, write_parquet

OBJECTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = OBJECTS.replace("c.function.arguments | tojson", "'args: ' + c.function.arguments")
PRINTED = OBJECTS.replace("c.function.arguments | tojson", "c.function.arguments")


def row(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "warm", "tool_call_id": "1"},
            {"role": "assistant", "content": "It is warm."},
        ]
    }


@pytest.mark.parametrize(
    ("template", "shown"),
    [(OBJECTS, '{"city": "SF"}'), (TEXTS, 'args: {"city": "SF"}'), (PRINTED, '{"city": "SF"}')],
)
def test_both_forms_give_identical_ids(tmp_path, template, shown):
    tokenizer = load(save_tokenizer(tmp_path, template=template))
    calls = {"messages": row({"city": "SF"})["messages"][:2]}
    texts = {"messages": row('{"city":"SF"}')["messages"][:2]}
    first, second = encode(tokenizer, calls), encode(tokenizer, texts)
    assert first.input_ids.tolist() == second.input_ids.tolist()
    assert targets_of(tokenizer, first) == targets_of(tokenizer, second) == f"<call>weather {shown}</call><|im_end|>"


@pytest.mark.parametrize("arguments", ["not json", "[1]", "null", 5, ["a"]])
def test_what_is_no_object_is_an_error_with_its_turn(arguments):
    with pytest.raises(DataError, match=r"message 1: tool call 0.*(arguments are not an object|is not JSON)"):
        read(row(arguments))


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_no_arguments_are_an_empty_object(arguments):
    found = read(row(arguments)).messages[1]["tool_calls"][0]["function"]
    assert found == {"name": "weather", "arguments": {}}


def test_keys_that_a_table_added_are_taken_out_again(tmp_path):
    model = save_tokenizer(tmp_path / "model", template=OBJECTS)
    rows = [row({"city": "SF", "deep": {"a": 1}}), row({"deep": {"b": [{"c": 1}, {"d": 2}]}, "place": "NY"})]
    lines = store(write_jsonl(tmp_path / "a.jsonl", rows), model=model, cache=tmp_path)
    table = store(write_parquet(tmp_path / "a.parquet", rows), model=model, cache=tmp_path)
    assert lines != table
    assert rows_of(lines) == rows_of(table)
    kept = read(row({"unit": None})).messages[1]["tool_calls"][0]["function"]["arguments"]
    assert kept == {"unit": None}
