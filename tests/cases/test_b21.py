"""B21: the default system text stands once."""

from tests.data.tokenizing import encode, load, read, targets_of, text_of
from tests.toys import T3, chat, save_tokenizer

NEEDS_A_USER = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no user') }}{% endif %}"
)


def test_one_render_of_the_whole(tmp_path):
    tokenizer = load(save_tokenizer(tmp_path, template=T3))
    example = encode(tokenizer, chat("q", "a"))
    text = "<|im_start|>system\nD<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    assert text_of(tokenizer, example) == text
    assert targets_of(tokenizer, example) == "a<|im_end|>"


def test_a_template_that_needs_a_user(tmp_path):
    tokenizer = load(save_tokenizer(tmp_path, template=NEEDS_A_USER + T3))
    example = encode(tokenizer, chat("q", "a", system="S"))
    assert text_of(tokenizer, example).count("system") == 1
    assert targets_of(tokenizer, example) == "a<|im_end|>"
    lone = {"messages": [{"role": "assistant", "content": "a"}]}
    assert encode(tokenizer, lone).reason == "unproven_span"


def test_the_rows_own_system_turn_stays(tmp_path):
    own, column = chat("q", "a", system="own"), {"system": "column"}
    assert [m["content"] for m in read({**own, **column}).messages] == ["own", "q", "a"]
    assert [m["content"] for m in read({**chat("q", "a"), **column}).messages] == ["column", "q", "a"]
    for nothing in (None, "", "  ", float("nan")):
        assert len(read({**chat("q", "a"), "system": nothing}).messages) == 2
