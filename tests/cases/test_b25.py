"""B25: content that is null, parts, or now this and now that."""

import pytest

from burnish.errors import DataError
from tests.data.tokenizing import CHATML, encode, load, read, rows_of, store, targets_of, text_of
from tests.toys import chat, write_jsonl

CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
HI = [{"type": "text", "text": "hi"}]


def assistant(content, **more):
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, **more}]}


def test_null_with_tool_calls_writes_no_none(model_dir):
    source = CHATML.replace("m['content'] +", "m['content'] + (m['tool_calls'] | tojson if m['tool_calls'] else '') +")
    tokenizer = load(model_dir, template=source)
    example = encode(tokenizer, assistant(None, tool_calls=[CALL]))
    shown = '[{"type": "function", "function": {"name": "f", "arguments": {}}}]<|im_end|>'
    assert text_of(tokenizer, example) == f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{shown}\n"
    assert targets_of(tokenizer, example) == shown
    without = encode(load(model_dir), assistant(None, tool_calls=[CALL]))
    assert (without.reason, without.detail) == ("unproven_span", "message 1: the template leaves its content out")


@pytest.mark.parametrize("nothing", [None, "", "  \n", [], float("nan")])
def test_an_empty_reply_is_dropped(nothing):
    assert read(assistant(nothing)).reason == "empty_reply"
    assert read(assistant(nothing, tool_calls=None)).reason == "empty_reply"
    assert read(assistant(nothing, tool_calls=[])).reason == "empty_reply"


@pytest.mark.parametrize("parts", [HI, [{"text": "hi"}], ["hi"], [{"type": "text", "text": "h", "image": None}, "i"]])
def test_text_parts_are_their_text(model_dir, parts):
    tokenizer = load(model_dir)
    assert targets_of(tokenizer, encode(tokenizer, assistant(parts))) == "hi<|im_end|>"


def test_one_file_with_both(model_dir, tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", [chat("q", "hi"), assistant(HI)])
    first, second = rows_of(store(file, model=model_dir, cache=tmp_path))
    assert first == second


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image", "image": "x.png"}], "message 1: an assistant turn with an image"),
        ([{"type": "audio"}], "message 1: a content part that is neither text nor an image: {'type': 'audio'}"),
        ([{"type": "text", "text": None}], "message 1: a content part that is neither text nor an image"),
        ({"a": 1}, "message 1: content is dict, not text"),
        (5, "content is int"),
    ],
)
def test_other_content_is_an_error_with_its_turn(content, message):
    with pytest.raises(DataError, match=message):
        read(assistant(content))
