"""No chat template that TRL ships gives a wrong mask, what is refused stands in docs/masks.md, and the judge can judge."""

import pytest

from burnish.data.tokenize import ConversationTokenizer
from burnish.data.turns import Found, TurnFinder
from tests.data.judge import Judge
from tests.data.shapes import SHAPES
from tests.data.templates_page import PAGE, TEMPLATES, line, refusals, verdicts
from tests.data.tokenizing import CHATML


def test_all_are_there():
    assert len(TEMPLATES) == 72
    assert len(SHAPES) == 28


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_mask_is_wrong(name):
    found = verdicts(name)
    assert {shape: verdict for shape, verdict in found.items() if verdict.word in ("wrong", "dropped")} == {}
    text = PAGE.read_text(encoding="utf-8")
    assert line(name, found) in text, "run python -m tests.data.templates_page"
    for shape, reason in refusals(found).items():
        section = text.partition(f"**{reason[0].upper()}{reason[1:]}**\n")[2].partition("\n**")[0]
        names = next(
            names for s, _, names in (entry.partition(": ") for entry in section.splitlines()) if s == f"* {shape}"
        )
        assert name in names.split(", ")


PLANTED = {
    "header": lambda text, a, b: (a - 1, b),
    "newline after the end": lambda text, a, b: (a, b + 1),
    "no end": lambda text, a, b: (a, b - len("<|im_end|>")),
    "a letter short": lambda text, a, b: (a + 1, b),
    "the user's turn": lambda text, a, b: (text.index("user\n") + 5, text.index("<|im_end|>") + 10),
    "the user's turn too": lambda text, a, b: (text.index("user\n") + 5, b),
    "nothing": lambda text, a, b: (a, a),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_the_judge_finds_planted_faults(tmp_path, monkeypatch, fault):
    judge = Judge(tmp_path, CHATML)
    assert judge.verdict(SHAPES["one turn"], None).word == "right"
    find = TurnFinder.find

    def planted(self, *args, **kwargs):
        text, spans, is_new = find(self, *args, **kwargs)
        return Found(text, [PLANTED[fault](text, *span) for span in spans], is_new)

    monkeypatch.setattr(TurnFinder, "find", planted)
    assert judge.verdict(SHAPES["one turn"], None).word in ("wrong", "refused")
    assert (judge.verdict(SHAPES["one turn"], None).word == "wrong") == (fault != "nothing")


def test_the_judge_finds_other_ids(tmp_path, monkeypatch):
    judge = Judge(tmp_path, CHATML)
    encode = ConversationTokenizer.encode

    def planted(self, conversations):
        (example,) = encode(self, conversations)
        example.input_ids[0] += 1
        return [example]

    monkeypatch.setattr(ConversationTokenizer, "encode", planted)
    assert judge.verdict(SHAPES["one turn"], None).word == "wrong"
