"""B06: one token holds the end of the header and the start of the answer."""

import pytest

from tests.data.tokenizing import ALL, LAST, encode, load
from tests.toys import chat

NEWLINES = 102
"""TK's one merged token."""


@pytest.mark.parametrize("what", [LAST, ALL])
def test_the_straddling_token_is_trained(model_dir, what):
    example = encode(load(model_dir, what=what), chat("q", "\na"))
    assert len(example.input_ids) == 23
    assert example.input_ids[19] == NEWLINES
    assert example.loss_mask.tolist() == [0] * 19 + [1, 1, 1, 0]


@pytest.mark.parametrize("what", [LAST, ALL])
def test_control(model_dir, what):
    example = encode(load(model_dir, what=what), chat("q", "a"))
    assert example.loss_mask.tolist() == [0] * 20 + [1, 1, 0]
