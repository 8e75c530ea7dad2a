"""Ids are those of transformers, and the masked ones decode to the answers, for many tokenizers and templates."""

import json
import unicodedata
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from burnish.config.choices import Truncation
from burnish.data import tokenize
from burnish.data.chat import Dropped
from burnish.data.tokenize import TokenizerSettings
from burnish.errors import DataError
from tests.data.families import FAMILIES, Family
from tests.data.tokenizing import ALL, CHATML, LAST, encode, load, read, targets_of, text_of
from tests.toys import T1, T2, T3, chat, save_tokenizer

SPECIALS = ("<s>", "<|im_start|>", "<|im_end|>")
CORPUS = ["user assistant system tool think the answer is one two three\n\n  café naïve 你好 🎉 a b c \n"] * 3


def byte_level(*, trim_offsets: bool = False, normalizer=None, prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def metaspace(prepend: str) -> Tokenizer:
    """As Llama 2, Mistral and Gemma: blanks are a letter, unknown letters are bytes."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prepend != "never" else steps)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(vocab_size=500, special_tokens=["<unk>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator([text for text in CORPUS for text in text.split("🎉")], trainer)
    layout = json.loads(tokenizer.to_str())
    # Byte tokens are of the vocabulary only: as added tokens they would match in the text itself.
    layout["added_tokens"] = [token for token in layout["added_tokens"] if token["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(layout))


TOKENIZERS = {
    "byte level": byte_level,
    "trimmed offsets": lambda: byte_level(trim_offsets=True),
    "NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "prefix space": lambda: byte_level(prefix_space=True),
    "metaspace never": lambda: metaspace("never"),
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
}


@cache
def folder(root: Path, name: str, family: str = "", *, rstrip: bool = False) -> Path:
    """A folder with that tokenizer, the tokens of that family and its template."""
    made = Family(CHATML, (), "<|im_end|>") if not family else FAMILIES[family]
    tokenizer = TOKENIZERS[name]()
    added = dict.fromkeys((*SPECIALS, *made.specials))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, rstrip=rstrip and text == made.close) for text in added]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=made.bos, eos_token=made.eos)
    fast.chat_template = made.template
    place = root / f"{name} {family} {rstrip}"
    fast.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@cache
def loaded(place: Path, what=ALL):
    return load(place, what=what)


def reference_ids(place: Path, messages: list[dict]) -> list[int]:
    return _reference(place).apply_chat_template(messages, tokenize=True, return_dict=False)


@cache
def _reference(place: Path):
    return PreTrainedTokenizerFast.from_pretrained(place)


CONVERSATIONS = {
    "short": ("q", "a"),
    "several turns": ("one", "the answer", "two", "is three", "three", "x"),
    "newlines and blanks": ("  q \n", "\n\n  lead and trail  \n\n", "\n", " one space"),
    "unicode": ("שלום 你好", "你好 👩‍👩‍👧‍👦🎉 naïve ﬁ ½ \u200b", "🎉", "🎉"),
    "not composed": ("e\u0301", "cafe\u0301 e\u0301", "x", "\u0301start"),
    "same texts": ("same text", "same text", "same text", "same text"),
    "header words": ("assistant\n", "assistant\n", "user", "user"),
    "metaspace sign": ("a▁b", "▁c▁ d", "x", "▁"),
}


@pytest.mark.parametrize("contents", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("rstrip", [False, True])
def test_every_kind_of_tokenizer(root, name, rstrip, contents):
    place = folder(root, name, rstrip=rstrip)
    tokenizer = loaded(place)
    row = chat(*contents)
    example = encode(tokenizer, row)
    assert not isinstance(example, Dropped), example.detail
    assert example.input_ids.tolist() == reference_ids(place, row["messages"])
    wanted = "".join(text + "<|im_end|>" for text in contents[1::2])
    got = targets_of(tokenizer, example)
    if name == "byte level" and not rstrip and "\n\n" not in wanted:
        assert got == wanted
    else:  # decoders of these lose or change blanks, the normalizer composes letters
        assert canonical(got) == canonical(wanted)
    closed = example.input_ids == _reference(place).eos_token_id
    assert example.loss_mask[closed].sum() == len(contents) // 2


def canonical(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).replace("▁", " ").split())


texts = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x00<"), min_size=1, max_size=12)
answers = texts.filter(lambda text: text.strip() != "")


@pytest.mark.parametrize("family", FAMILIES)
@given(
    contents=st.lists(st.tuples(texts, answers), min_size=1, max_size=3),
    system=st.none() | texts,
    tail=st.none() | texts,
)
@settings(max_examples=15, deadline=None)
def test_any_conversation_of_any_family(root, family, contents, system, tail):
    place = folder(root, "byte level", family)
    made = FAMILIES[family]
    alternating = family in ("mistral", "gemma")
    row = chat(*[text for pair in contents for text in pair], system=None if alternating else system)
    if tail is not None and family != "qwen3":  # with another user, its last answer is an earlier one
        row["messages"].append({"role": "user", "content": tail})
    whole = encode(loaded(place, ALL), row)
    assert whole.input_ids.tolist() == reference_ids(place, row["messages"])
    turns = runs(loaded(place, ALL), whole)
    assert len(turns) == len(contents)
    for i, (turn, (_, answer)) in enumerate(zip(turns, contents, strict=True)):
        wanted = made.target(answer, last=i == len(contents) - 1)
        assert turn.endswith(wanted)
        assert not turn.removesuffix(wanted).strip(), "nothing more than the blanks of a straddling token"
    last = encode(loaded(place, LAST), row)
    assert last.input_ids.tolist() == whole.input_ids.tolist()
    assert runs(loaded(place, ALL), last) == turns[-1:]


def runs(tokenizer, example):
    """The text of each unbroken run of targets."""
    edges = np.flatnonzero(np.diff(example.loss_mask, prepend=0, append=0))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer.decode(example.input_ids[start:stop]) for start, stop in pairs]


@pytest.mark.parametrize(("template", "begins"), [(T1, ""), (T2, ""), (T3, "<|im_start|>system\nD<|im_end|>\n")])
def test_literal_text_of_the_toys(tmp_path, template, begins):
    tokenizer = load(save_tokenizer(tmp_path, template=template), what=ALL)
    example = encode(tokenizer, chat("q1", "a1", "q2", "a2"))
    think = "<think>\n\n</think>\n\n" if template == T2 else ""
    body = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
    tail = f"<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n{think}a2<|im_end|>\n"
    assert text_of(tokenizer, example) == begins + body + tail
    assert targets_of(tokenizer, example) == f"a1<|im_end|>{think}a2<|im_end|>"


def test_letters_that_the_tokenizer_does_not_have(model_dir):
    tokenizer = load(model_dir)
    assert targets_of(tokenizer, encode(tokenizer, chat("ü", "a"))) == "a<|im_end|>"
    lost = encode(tokenizer, chat("q", "aü"))
    assert (lost.reason, lost.detail) == (
        "unproven_span",
        "its tokens decode to 'a<|im_end|>', the turn says 'aü<|im_end|>'",
    )


def test_a_terminator_that_is_no_token(tmp_path):
    place = save_tokenizer(tmp_path, template=CHATML.replace("<|im_end|>\\n", "END\\n\\n"))
    tokenizer = load(place)
    assert targets_of(tokenizer, encode(tokenizer, chat("q", "a"))) == "aEND"
    assert any("'END', which is no token" in notice for notice in tokenizer.notices)
    open_ended = CHATML.replace("<|im_end|>\\n", "\\n")
    tokenizer = load(place, template=open_ended)
    assert targets_of(tokenizer, encode(tokenizer, chat("q", "a"))) == "a"
    assert targets_of(tokenizer, encode(tokenizer, chat("q", "a\n"))) == "a\n\n"
    assert "the token that ends a turn holds the blanks after it too; it is trained" in tokenizer.notices


def test_a_token_that_runs_into_other_text_is_refused(tmp_path):
    place = save_tokenizer(tmp_path, template=CHATML.replace("+ '<|im_end|>\\n'", "+ 'EN' + 'DX'"))
    layout = json.loads((place / "tokenizer.json").read_text())
    vocabulary = layout["model"]["vocab"]
    vocabulary["a<"] = len(vocabulary)
    layout["model"]["merges"].append(["a", "<"])
    (place / "tokenizer.json").write_text(json.dumps(layout))
    source = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}{{ '<' }}{% endif %}{% endfor %}"
    tokenizer = load(place, template=source, what=ALL)
    turns = [("user", "q"), ("assistant", "a"), ("user", "<")]
    found = encode(tokenizer, {"messages": [{"role": role, "content": text} for role, text in turns]})
    assert (found.reason, found.detail) == ("unproven_span", "a token runs past the end of the turn, into '<'")


@pytest.mark.parametrize(
    ("max_length", "truncation", "targets"),
    [
        (24, Truncation.DROP, "ok<|im_end|>"),
        (23, Truncation.RIGHT, "ok<|im_end|>"),
        (22, Truncation.RIGHT, "ok"),
        (21, Truncation.RIGHT, "o"),
        (20, Truncation.RIGHT, "no_target"),
        (2, Truncation.RIGHT, "no_target"),
        (23, Truncation.DROP, "too_long"),
    ],
)
def test_truncation(model_dir, max_length, truncation, targets):
    # 24 tokens: 20 of prompt and header, o, k, the end of the turn, a newline.
    tokenizer = load(model_dir, max_length=max_length, truncation=truncation)
    found = encode(tokenizer, chat("q", "ok"))
    assert (found.reason if isinstance(found, Dropped) else targets_of(tokenizer, found)) == targets


def test_a_tokenizer_with_a_truncation_and_a_post_processor_of_its_own(root, tmp_path):
    fast = PreTrainedTokenizerFast.from_pretrained(folder(root, "byte level", "llama3"))
    backend = fast.backend_tokenizer
    backend.enable_truncation(5)
    backend.enable_padding(length=64)
    begin = ("<|begin_of_text|>", fast.bos_token_id)
    backend.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[begin])
    fast.save_pretrained(tmp_path)
    tokenizer = load(tmp_path)
    example = encode(tokenizer, chat("question", "answer"))
    assert (example.input_ids == fast.bos_token_id).sum() == 1
    assert targets_of(tokenizer, example) == "answer<|eot_id|>"


def test_what_transformers_would_render_otherwise_stops_the_run(model_dir, monkeypatch):
    tokenizer = load(model_dir)
    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", lambda *_, **__: "other")
    with pytest.raises(DataError, match="transformers renders 'other' where Burnish renders"):
        tokenizer.encode([read(chat("q", "a"))])
    monkeypatch.undo()
    monkeypatch.setattr(tokenize, "NUM_VERIFIED", 0)
    tokenizer = load(model_dir)
    tokenizer.encode([read(chat("q", "a"))])
    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", lambda *_, **__: "other")
    assert len(tokenizer.encode([read(chat("Q", "A"))])) == 1, "one of each shape is compared"
    with pytest.raises(DataError, match="transformers renders 'other'"):
        tokenizer.encode([read(chat("q", "a", "q", "a"))])


def test_template_file_text_and_none(model_dir, tmp_path):
    (tmp_path / "t.jinja").write_text(T3)
    assert (
        load(model_dir, template=T3).template_hash == load(model_dir, template=str(tmp_path / "t.jinja")).template_hash
    )
    assert load(model_dir, template=T3).template_hash != load(model_dir).template_hash
    assert load(model_dir, template=T3).tokenizer_hash == load(model_dir).tokenizer_hash
    with pytest.raises(DataError, match="neither a template nor a file"):
        load(model_dir, template="missing.jinja")
    with pytest.raises(DataError, match="does not compile"):
        load(model_dir, template="{% for")
    bare = PreTrainedTokenizerFast.from_pretrained(model_dir)
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(DataError, match=r"has no chat template .*\n.*set chat_template"):
        load(tmp_path / "bare")
    with pytest.raises(DataError, match="its tokenizer cannot be loaded"):
        load(tmp_path / "nothing")


def test_a_template_that_writes_the_date_is_told(model_dir):
    tokenizer = load(model_dir, template="{{ strftime_now('%Y') }}" + T1)
    assert any("date" in notice for notice in tokenizer.notices)


def test_a_template_of_its_own_for_tools(tmp_path):
    fast = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(tmp_path))
    fast.chat_template = {"default": T1, "tool_use": "TOOLS" + T1}
    fast.save_pretrained(tmp_path)
    tokenizer = load(tmp_path)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert text_of(tokenizer, encode(tokenizer, {**chat("q", "a"), "tools": tools})).startswith("TOOLS")
    assert not text_of(tokenizer, encode(tokenizer, chat("q", "a"))).startswith("TOOLS")


def test_unknown_words_are_not_taken_for_the_answer(tmp_path):
    vocabulary = {word: i for i, word in enumerate(["<unk>", *SPECIALS, "user", "assistant", "hello"])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<|im_end|>")
    fast.chat_template = T1
    fast.save_pretrained(tmp_path)
    tokenizer = load(tmp_path)
    example = encode(tokenizer, chat("what", "hello"))
    assert example.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert encode(tokenizer, chat("hello", "what")).reason == "unproven_span"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_what_the_rows_give_cannot_be_set_for_the_template(model_dir, name):
    with pytest.raises(DataError, match=f"{name} come from the rows"):
        TokenizerSettings(str(model_dir), chat_template_kwargs={name: []}).load()
