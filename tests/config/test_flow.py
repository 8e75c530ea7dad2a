import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.flow import Plain, ReadError, parse_flow


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("['a','b']", ["a", "b"]),
        ("[a, b]", ["a", "b"]),
        ('["a", b]', ["a", "b"]),
        ("[]", []),
        ("{}", {}),
        ("[a, ]", ["a"]),
        ("['']", [""]),
        ("[train[:100]]", ["train[:100]"]),
        ("[train[:50%], test[10:20]]", ["train[:50%]", "test[10:20]"]),
        ("['/a, b']", ["/a, b"]),
        ("[/a, b]", ["/a", "b"]),
        ("['s3://b/k=v/x']", ["s3://b/k=v/x"]),
        ("[s3://b/a #1, c]", ["s3://b/a #1", "c"]),
        ("[12:30, 010, 1e3, on, no, ~]", ["12:30", "010", "1e3", "on", "no", "~"]),
        ("[*a, &b, !c, %d, @e, |f]", ["*a", "&b", "!c", "%d", "@e", "|f"]),
        ("['it''s', 'it\\'s']", ["it's", "it's"]),
        ("['C:\\new']", ["C:\\new"]),
        ("{num_samples: 40}", {"num_samples": "40"}),
        ("{'a': 'b', c: [d, {e: f}]}", {"a": "b", "c": ["d", {"e": "f"}]}),
        ("{url: http://x/y}", {"url": "http://x/y"}),
        ("{a: , b: 1}", {"a": "", "b": "1"}),
    ],
)
def test_both_spellings(text, value):
    assert parse_flow(text) == value


def test_quotes_are_remembered():
    plain, quoted = parse_flow("[40, '40']")
    assert isinstance(plain, Plain)
    assert type(quoted) is str


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a", "closing ']' is missing"),
        ("[train[:100]", "closing ']' is missing"),
        ("['a]", "closing ' is missing"),
        ("[a]b]", "'b]' follows the end"),
        ("[a] # b", "'# b' follows the end"),
        ("['a' b]", "'b]' follows a closed item"),
        ("[a,,b]", "an item is empty"),
        ("{a}", "is not followed by ': value'"),
        ("{a: 1, a: 2}", "'a' is given twice"),
        ('["\\q"]', "Invalid \\escape"),
        ("[" * 5000, "recursion"),
    ],
)
def test_nothing_is_guessed(text, said):
    with pytest.raises(ReadError) as error:
        parse_flow(text)
    assert said in str(error.value)


_TEXTS = st.lists(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=0, max_size=8), max_size=4)


@given(_TEXTS)
def test_what_python_prints_is_read_back(texts):
    assert parse_flow(repr(texts)) == texts


@given(_TEXTS, st.booleans())
def test_what_json_prints_is_read_back(texts, ascii_only):
    assert parse_flow(json.dumps(texts, ensure_ascii=ascii_only)) == texts
