"""Ids and targets of one conversation, literally, for each family of templates."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.families import FAMILIES
from tests.data.judge import Judge, save_bytes_tokenizer
from tests.data.shapes import SHAPES, TOOLS, USE_TOOLS
from tests.data.tokenizing import ALL, LAST, encode, load
from tests.toys import chat

ROW = chat("Hi", " Hello\n", "More?", "Yes.")
GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
"""By family: the text, its ids (a byte each, and one for each control token), the targets as [first, last) and as text."""


def measured(folder, family, what):
    made = FAMILIES[family]
    special = (*made.specials, made.bos, made.eos, "<|im_start|>", "<|im_end|>")
    tokenizer = load(
        save_bytes_tokenizer(folder, made.template, special=special, bos=made.bos, eos=made.eos), what=what
    )
    example = encode(tokenizer, ROW)
    runs = np.flatnonzero(np.diff(example.loss_mask, prepend=0, append=0)).reshape(-1, 2).tolist()
    return {
        "text": tokenizer.decode(example.input_ids),
        "ids": example.input_ids.tolist(),
        "runs": runs,
        "targets": [tokenizer.decode(example.input_ids[slice(*run)]) for run in runs],
    }


def test_every_family_has_one():
    assert set(GOLDEN) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_turns(tmp_path, family):
    assert measured(tmp_path, family, ALL) == GOLDEN[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_turn(tmp_path, family):
    golden = GOLDEN[family]
    last = {"runs": golden["runs"][-1:], "targets": golden["targets"][-1:]}
    assert measured(tmp_path, family, LAST) == {**golden, **last}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_shape_of_conversation_gets_a_wrong_mask(tmp_path, family):
    judge = Judge(tmp_path, FAMILIES[family].template)
    found = {name: judge.verdict(shape, TOOLS if name in USE_TOOLS else None) for name, shape in SHAPES.items()}
    assert {name: verdict for name, verdict in found.items() if verdict.word in ("wrong", "dropped")} == {}
    plain = {name for name in SHAPES if name not in USE_TOOLS}
    assert all(found[name].word in ("right", "unrenderable") for name in plain), "only tools may be refused"
