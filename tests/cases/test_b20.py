"""B20: masks do not need generation markers, and are not fooled by them."""

from tests.data.tokenizing import ALL, encode, load, targets_of
from tests.toys import chat, save_tokenizer

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_without_markers(model_dir):
    tokenizer = load(model_dir, what=ALL)
    example = encode(tokenizer, chat("q1", "a1", "q2", "a2"))
    assert targets_of(tokenizer, example) == "a1<|im_end|>a2<|im_end|>"


def test_with_markers_and_the_assistant_first(tmp_path):
    tokenizer = load(save_tokenizer(tmp_path, template=MARKED), what=ALL)
    turns = [("assistant", "A"), ("user", "bc"), ("assistant", "d")]
    example = encode(tokenizer, {"messages": [{"role": role, "content": text} for role, text in turns]})
    assert example.loss_mask.tolist() == [1, 0, 0, 1]
    assert "the chat template closes no assistant turn; the end is not learnt" in tokenizer.notices


def test_a_lone_token_at_position_0_is_no_target(tmp_path):
    tokenizer = load(save_tokenizer(tmp_path, template=MARKED), what=ALL)
    turns = [{"role": "assistant", "content": "A"}, {"role": "user", "content": "bc"}]
    assert encode(tokenizer, {"messages": turns}).reason == "no_target"
