"""The faster engine is used where it gives the same ids on the very data, and nowhere else."""

import logging

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from burnish.data import encoder, write
from burnish.data.encoder import Encoder
from tests.data.test_tokenize import byte_level, folder
from tests.data.tokenizing import rows_of, store
from tests.toys import chat, write_jsonl

TEXTS = ["user\n the answer<|im_end|>\n", "", "café e\u0301 你好 🎉 " * 3]


@pytest.fixture
def backend():
    return byte_level()


def test_the_same_ids_from_both_engines(backend, caplog):
    caplog.set_level(logging.INFO)
    both = Encoder(backend)
    own = both.encode(TEXTS)
    assert both.try_fast(TEXTS)
    assert "same ids for 3 rows" in caplog.text
    fast = both.encode([*TEXTS, "and another"])
    assert [ids.tolist() for ids in fast[:3]] == [ids.tolist() for ids in own]
    assert {ids.dtype for ids in (*own, *fast)} == {np.dtype(np.int32)}
    other = Encoder(backend)
    other.use_fast()
    assert [ids.tolist() for ids in other.encode(TEXTS)] == [ids.tolist() for ids in own]
    assert both.encode([]) == []


def test_other_ids_on_one_row_and_it_is_not_used(backend, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    fast_ids = encoder._fast_ids
    monkeypatch.setattr(
        encoder, "_fast_ids", lambda *of: [ids[::-1] if i == 2 else ids for i, ids in enumerate(fast_ids(*of))]
    )
    both = Encoder(backend)
    own = both.encode(TEXTS)
    assert not both.try_fast(TEXTS)
    assert "other ids for 1 of 3 rows" in caplog.text
    assert [ids.tolist() for ids in both.encode(TEXTS)] == [ids.tolist() for ids in own]


def test_a_tokenizer_that_it_does_not_know(caplog):
    caplog.set_level(logging.INFO)
    both = Encoder(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b")))
    assert not both.try_fast(["a"])
    assert "gigatoken cannot be used" in caplog.text
    assert both.encode(["a"])[0].tolist() == [0]


def test_offsets_are_those_of_the_tokenizer(backend):
    ids, offsets = Encoder(backend).encode_with_offsets("你 a")
    assert [offsets[0].tolist(), offsets[-1].tolist()] == [[0, 1], [1, 3]]
    assert len(ids) == len(offsets)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_store_is_the_same_with_both_engines(tmp_path, monkeypatch, caplog, num_workers):
    caplog.set_level(logging.INFO)
    file = write_jsonl(
        tmp_path / "x.jsonl",
        [chat(f"q {i}", "\n" * (i % 3) + f"the answer {i}") for i in range(1100)],
    )
    place = folder(tmp_path, "byte level")
    monkeypatch.setattr(encoder, "find_spec", lambda _: None)
    own = rows_of(store(file, model=place, cache=tmp_path / "own"))
    assert "gigatoken" not in caplog.text
    monkeypatch.undo()
    fast = rows_of(store(file, model=place, cache=tmp_path / "fast", num_workers=num_workers))
    assert "gigatoken gives the same ids for 256 rows" in caplog.text
    assert fast == own


def test_few_rows_are_not_worth_it(tmp_path, caplog, model_dir):
    caplog.set_level(logging.INFO)
    runs, length = write.SAMPLED_ROWS
    file = write_jsonl(tmp_path / "x.jsonl", [chat("q", "a")] * (4 * runs * length - 1))
    store(file, model=model_dir, cache=tmp_path / "own")
    assert "gigatoken" not in caplog.text
