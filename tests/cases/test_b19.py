"""B19: neither the role header nor the newline after the end of a turn is trained."""

import pytest

from tests.data.tokenizing import ALL, LAST, encode, load, rows_of, store
from tests.toys import chat, write_jsonl

IDS = {c: 3 + i for i, c in enumerate(["\n", *(chr(c) for c in range(32, 127))])} | {"[": 1, "]": 2}
"""TK's ids, with [ and ] for <|im_start|> and <|im_end|>."""


@pytest.mark.parametrize("what", [LAST, ALL])
def test_the_answer_and_its_end_are_all(model_dir, what, tmp_path):
    row = chat("q", "ok")
    ids = [IDS[c] for c in "[user\nq]\n[assistant\nok]\n"]
    mask = [0] * 20 + [1, 1, 1, 0]
    example = encode(load(model_dir, what=what), row)
    assert example.input_ids.tolist() == ids
    assert example.loss_mask.tolist() == mask
    folder = store(
        write_jsonl(tmp_path / "x.jsonl", [row]), model=model_dir, cache=tmp_path / "cache", train_on_what=what
    )
    assert rows_of(folder) == [(ids, mask)]
