"""Rows in the forms that people have become the same conversations."""

import pytest

from burnish.data.chat import SHAREGPT_NOTICE, Dropped, Kind, chat_reader
from burnish.data.rows import RawRows
from burnish.errors import DataError
from tests.data.tokenizing import ALL, LAST, encode, load, read, targets_of, text_of
from tests.toys import chat

CALL = {"name": "f", "arguments": {"x": 1}}


class Rows(RawRows):
    """Rows in a list."""

    def __init__(self, *rows):
        super().__init__(fingerprint="", column_names=rows[0] if rows else ())
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def describe(self, index):
        return f"row {index}"


def reader(*rows, messages_key=None):
    return chat_reader(Rows(*rows), name="x", messages_key=messages_key, tools_key=None, system_key=None)


def sharegpt(*turns):
    return [{"from": speaker, "value": value} for speaker, value in turns]


SHAREGPT = sharegpt(("system", "s"), ("human", "q"), ("gpt", "a"))
PLAIN = chat("q", "a", system="s")["messages"]


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_sharegpt_rows_are_read_with_a_notice(key):
    found = reader({key: SHAREGPT})
    assert found.read({key: SHAREGPT}).messages == tuple(PLAIN)
    assert found.notices == (SHAREGPT_NOTICE,)
    assert reader({key: PLAIN}).read({key: PLAIN}).messages == tuple(PLAIN)
    assert reader({key: PLAIN}).notices == ()


def test_sharegpt_speakers():
    turns = sharegpt(("user", "q"), ("function_call", '{"name": "f", "arguments": {"x": 1}}'), ("observation", "r"))
    found = read({"messages": [*turns, {"from": "assistant", "value": "a", "weight": 1}]}).messages
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]
    assert found[1] == {"role": "assistant", "tool_calls": [CALL]}
    assert found[3] == {"role": "assistant", "content": "a"}
    with pytest.raises(DataError, match="unknown role 'narrator'"):
        read({"messages": sharegpt(("narrator", "x"))})


def test_messages_win_over_conversations_and_prompts():
    both = {"messages": chat("m", "n")["messages"], "conversations": SHAREGPT, "prompt": "p", "completion": "c"}
    assert reader(both).read(both).messages[0]["content"] == "m"
    assert reader(both, messages_key="conversations").read(both).messages[0]["content"] == "s"
    del both["messages"]
    assert reader(both).read(both).messages[0]["content"] == "s"
    del both["conversations"]
    assert reader(both).kind is Kind.COMPLETION


@pytest.mark.parametrize("what", [LAST, ALL])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("q", "a"), (chat("q")["messages"], "a"), ("q", [{"role": "assistant", "content": "a"}])],
)
def test_prompt_and_completion(model_dir, what, prompt, completion):
    row = {"prompt": prompt, "completion": completion}
    found, wanted = (
        encode(load(model_dir), each, kind=k) for each, k in ((row, Kind.COMPLETION), (chat("q", "a"), Kind.CHAT))
    )
    assert found.input_ids.tolist() == wanted.input_ids.tolist()
    assert found.loss_mask.tolist() == wanted.loss_mask.tolist()


def test_only_the_completion_is_trained(model_dir):
    row = {"prompt": chat("q", "a", "r")["messages"], "completion": chat("b", "s", "c")["messages"]}
    for message in row["completion"]:
        message["role"] = {"user": "assistant", "assistant": "user"}[message["role"]]
    tokenizer = load(model_dir, what=ALL)
    assert targets_of(tokenizer, encode(tokenizer, row, kind=Kind.COMPLETION)) == "b<|im_end|>c<|im_end|>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "", "completion": "a"}, "empty_prompt"),
        ({"prompt": [], "completion": "a"}, "empty_prompt"),
        ({"prompt": "q", "completion": " "}, "empty_reply"),
        ({"prompt": "q", "completion": None}, "empty_reply"),
        ({"prompt": "q", "completion": chat("only a user")["messages"]}, "no_assistant"),
    ],
)
def test_a_prompt_or_completion_without_text(row, reason):
    assert read(row, kind=Kind.COMPLETION).reason == reason


def flagged(*flags, key="train"):
    row = chat("q", "a", "r", "b")
    for message, flag in zip(row["messages"][1::2], flags, strict=True):
        message[key] = flag
    return row


@pytest.mark.parametrize("key", ["train", "weight"])
@pytest.mark.parametrize(
    ("flags", "last", "everything"),
    [
        ((True, True), "b<|im_end|>", "a<|im_end|>b<|im_end|>"),
        ((False, True), "b<|im_end|>", "b<|im_end|>"),
        ((1, 0), "a<|im_end|>", "a<|im_end|>"),
        ((None, 0.0), "a<|im_end|>", "a<|im_end|>"),
    ],
)
def test_a_turn_can_be_kept_from_training(model_dir, key, flags, last, everything):
    row = flagged(*flags, key=key)
    for what, wanted in ((LAST, last), (ALL, everything)):
        tokenizer = load(model_dir, what=what)
        example = encode(tokenizer, row)
        assert targets_of(tokenizer, example) == wanted
        assert text_of(tokenizer, example) == text_of(tokenizer, encode(tokenizer, chat("q", "a", "r", "b")))


def test_flags_never_reach_the_template():
    assert all(set(message) == {"role", "content"} for message in read(flagged(False, True)).messages)


def test_no_turn_left_to_train():
    found = read(flagged(False, 0))
    assert isinstance(found, Dropped)
    assert (found.reason, found.detail) == (
        "no_target",
        "train is false in all assistant turns of user, assistant, user, assistant",
    )
    unanswered = flagged(True, False)
    unanswered["messages"][3]["content"] = ""
    assert read(unanswered).trainable == (1,), "an empty turn that is not trained does no harm"


@pytest.mark.parametrize("flag", [0.5, 2, "false", [1]])
def test_a_flag_that_is_neither_true_nor_false(flag):
    with pytest.raises(DataError, match=r"message 1: train is .*\n.*true or false, 1 or 0"):
        read(flagged(flag, True))


def test_only_assistant_turns_can_be_trained():
    row = flagged(True, True)
    row["messages"][0]["train"] = True
    with pytest.raises(DataError, match="message 0: train is true in a user turn"):
        read(row)
    row["messages"][0]["train"] = False
    assert read(row).trainable == (1, 3)


def test_developer_and_several_system_turns(model_dir):
    turns = [("system", "s"), ("developer", "d"), ("user", "q"), ("system", "t"), ("assistant", "a")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns], "system": "not this"}
    tokenizer = load(model_dir)
    example = encode(tokenizer, row)
    assert text_of(tokenizer, example) == "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert targets_of(tokenizer, example) == "a<|im_end|>"
