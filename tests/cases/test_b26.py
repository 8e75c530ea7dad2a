"""B26: conversations that do not end with the assistant, and roles that are none."""

import pytest

from burnish.errors import DataError
from tests.data.tokenizing import ALL, LAST, encode, load, read, store, targets_of, text_of
from tests.toys import write_jsonl


def turns(*pairs):
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


U, A, U2, T = ("user", "u1"), ("assistant", "a1"), ("user", "u2"), ("tool", "t1")


@pytest.mark.parametrize("what", [LAST, ALL])
@pytest.mark.parametrize("row", [turns(U, A, U2), turns(U, A, T), turns(U, U2, A), turns(U, A)])
def test_the_one_assistant_turn_is_trained_in_the_whole_conversation(model_dir, what, row):
    tokenizer = load(model_dir, what=what)
    example = encode(tokenizer, row)
    assert targets_of(tokenizer, example) == "a1<|im_end|>"
    assert all(m["content"] in text_of(tokenizer, example) for m in row["messages"])


def test_the_assistant_first(model_dir):
    row = turns(("assistant", "a0"), U, A)
    assert targets_of(load(model_dir), encode(load(model_dir), row)) == "a1<|im_end|>"
    assert targets_of(load(model_dir), encode(load(model_dir, what=ALL), row)) == "a0<|im_end|>a1<|im_end|>"


def test_from_and_value_are_mapped():
    row = {"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    assert read(row).messages == read(turns(("user", "hi"), ("assistant", "yo"))).messages


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (turns(("system", "s")), "no_assistant"),
        (turns(), "no_assistant"),
        ({"messages": None}, "no_assistant"),
        (turns(U, ("assistant", "")), "empty_reply"),
        (turns(U, A, U2, ("assistant", " ")), "empty_reply"),
    ],
)
def test_what_cannot_be_trained_is_dropped(row, reason):
    assert read(row).reason == reason


def test_an_empty_turn_in_the_middle_is_no_target(model_dir):
    tokenizer = load(model_dir, what=ALL)
    example = encode(tokenizer, turns(U, ("assistant", ""), U2, A))
    assert targets_of(tokenizer, example) == "a1<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"speaker": "human", "value": "hi"}]}, "message 0: .*role and content; found speaker, value"),
        (turns(("Assistant", "x")), "message 0: unknown role 'Assistant'"),
        (turns(U, ("human", "x")), "message 1: unknown role 'human'"),
        (turns(U, (None, "x")), "message 1: a message needs role and content"),
        ({"messages": "hi"}, "messages: is not JSON"),
        ({"messages": {"role": "user"}}, "messages: is dict, not a list"),
        ({"messages": ["hi"]}, "message 0: .*found 'hi'"),
    ],
)
def test_what_is_no_message_is_an_error(row, message):
    with pytest.raises(DataError, match=message):
        read(row)


def test_a_run_on_nothing_but_such_rows_ends(model_dir, tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", [turns(("system", "s")), turns(), turns(U, ("assistant", ""))])
    with pytest.raises(DataError, match="3 of 3 rows dropped: 2 no_assistant, 1 empty_reply"):
        store(file, model=model_dir, cache=tmp_path)
