"""B03: a template that takes the thinking out of earlier turns."""

from tests.data.tokenizing import ALL, LAST, encode, load, read, targets_of
from tests.toys import T2, chat, save_tokenizer

ROW = chat("u1", "<think>\nr1\n</think>\n\na1", "u2", "a2")


def test_the_mask_is_that_of_the_final_render(tmp_path):
    tokenizer = load(save_tokenizer(tmp_path, template=T2), what=ALL)
    example = encode(tokenizer, ROW)
    # Rendered alone, the first two messages are not how the whole begins: there the think block is still in.
    prefix = tokenizer.decode(encode(tokenizer, {"messages": ROW["messages"][:2]}).input_ids)
    assert not tokenizer.decode(example.input_ids).startswith(prefix)
    assert targets_of(tokenizer, example) == "a1<|im_end|><think>\n\n</think>\n\na2<|im_end|>"


def test_the_last_turn_works_without_complaint(tmp_path):
    tokenizer = load(save_tokenizer(tmp_path, template=T2), what=LAST)
    assert targets_of(tokenizer, encode(tokenizer, ROW)) == "<think>\n\n</think>\n\na2<|im_end|>"


def test_both_turns_after_one_user_keep_their_thinking(tmp_path):
    tokenizer = load(save_tokenizer(tmp_path, template=T2), what=ALL)
    turns = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "<think>\nr1\n</think>\n\na1"},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "<think>\nr2\n</think>\n\na2"},
    ]
    wanted = "<think>\nr1\n</think>\n\na1<|im_end|><think>\nr2\n</think>\n\na2<|im_end|>"
    assert targets_of(tokenizer, encode(tokenizer, {"messages": turns})) == wanted
    assert len(read({"messages": turns}).messages) == 4
