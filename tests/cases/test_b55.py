"""B55: the forms of the tools column."""

import json

import pytest

from burnish.errors import DataError
from tests.data.tokenizing import ALL, encode, load, read, rows_of, store, targets_of, text_of
from tests.toys import T1, chat, save_tokenizer, write_jsonl, write_parquet

TEMPLATE = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + T1
FUNCTION = {"name": "f", "description": "F", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
ROW = chat("q1", "a1", "q2", "a2")


@pytest.fixture
def model(tmp_path):
    return save_tokenizer(tmp_path / "model", template=TEMPLATE)


@pytest.mark.parametrize(
    "tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], TOOL, [FUNCTION], json.dumps(FUNCTION)]
)
def test_every_form_of_one_tool_gives_the_same_ids(model, tools):
    tokenizer = load(model, what=ALL)
    example = encode(tokenizer, {**ROW, "tools": tools})
    assert example.input_ids.tolist() == encode(tokenizer, {**ROW, "tools": [TOOL]}).input_ids.tolist()
    assert text_of(tokenizer, example).count(json.dumps([TOOL])) == 1
    assert targets_of(tokenizer, example) == "a1<|im_end|>a2<|im_end|>"


@pytest.mark.parametrize("tools", [None, [], "", "null", " ", "[]", float("nan")])
def test_no_tools_in_every_spelling(model, tools):
    tokenizer = load(model)
    assert encode(tokenizer, {**ROW, "tools": tools}).input_ids.tolist() == encode(tokenizer, ROW).input_ids.tolist()


@pytest.mark.parametrize("tools", ["[{", 5, "7", ["f"], [5], [None]])
def test_broken_tools_are_an_error(tools):
    with pytest.raises(DataError, match="tools: "):
        read({**ROW, "tools": tools})


def test_half_of_the_rows_have_tools(model, tmp_path):
    rows = [{**ROW, "tools": [TOOL]}, ROW, {**ROW, "tools": [{**TOOL, "function": {**FUNCTION, "strict": True}}]}]
    lines = rows_of(store(write_jsonl(tmp_path / "a.jsonl", rows), model=model, cache=tmp_path))
    assert lines == rows_of(store(write_parquet(tmp_path / "a.parquet", rows), model=model, cache=tmp_path))
    assert len(lines[0][0]) > len(lines[1][0])


def test_a_column_that_is_named_must_exist(model, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [ROW])
    with pytest.raises(DataError, match="tools_key='functions', but the columns are messages"):
        store(file, model=model, cache=tmp_path, tools_key="functions")
