"""A run keeps what its page will show of the data: counts, and rows that it reads one by one."""

import base64
import io
import json
import logging
from functools import partial

import pytest
from PIL import Image

from burnish.assemble.data import image_reader, open_evals, open_train
from burnish.assemble.facts import write_facts
from burnish.assemble.model import require_valid
from burnish.config import SFTConfig
from burnish.models.load import read_tokenizer
from tests.toys import chat, row, write_jsonl
from tests.vision_models import save_vision_model


@pytest.fixture
def noted(tmp_path):
    """Open the data of a config and give back what is noted of it."""

    def note(model, **keys):
        config = SFTConfig(model={"path": str(model)}, num_workers=0, **keys)
        card = require_valid(config)
        stores = open_train(config, card)
        parts = {
            "stores": stores,
            "evals": open_evals(config, card),
            "tokenizer": partial(read_tokenizer, card.path),
            "reader": partial(image_reader, card.path, trust_remote_code=False),
            "image_token_id": card.vision.image_token_id if card.vision else None,
            "seed": 1,
        }
        write_facts(tmp_path, **parts)
        return json.loads((tmp_path / "data.json").read_text()), stores, parts

    return note


def test_counts_and_rows_of_every_source(tmp_path, model_dir, noted):
    chats = write_jsonl(
        tmp_path / "chats.jsonl", [chat(f"question {n}", f"<b>{n}") for n in range(9)] + [chat("q", "")]
    )
    held = write_jsonl(tmp_path / "held.jsonl", [row([4, 5, 6], [0, 1, 1])])
    long = write_jsonl(tmp_path / "long.jsonl", [chat("a" * 210 + "b" * 210, "c")])
    facts, stores, _ = noted(
        model_dir,
        train_datasets=[str(chats), str(long)],
        eval_pretokenized_dataset_paths=[str(held)],
    )
    assert facts["sources"][0] | {"name": "chats"} == {
        "name": "chats",
        "rows": 10,
        "kept": 9,
        "dropped": {"empty_reply": 1},
        "tokens": int(stores[0].lengths.sum()),
        "targets": int(stores[0].target_counts.sum()),
    }
    assert [source["name"] for source in facts["eval_sources"]] == ["held.jsonl"]
    samples = facts["samples"]
    assert len({sample["row"] for sample in samples}) == len(samples) == 3, "two of four fall to each; one has but one"
    for sample in samples[:2]:
        number = sample["row"]
        prompt = f"<|im_start|>user\nquestion {number}<|im_end|>\n<|im_start|>assistant\n"
        assert sample["spans"] == [[prompt, False], [f"<b>{number}<|im_end|>", True], ["\n", False]]
        assert (sample["targets"], sample["images"]) == (len(f"<b>{number}") + 1, [])
    assert samples[2]["row"] == 9
    text = samples[2]["spans"][0][0]
    assert text.endswith("b<|im_end|>\n<|im_start|>assistant\n")
    assert "a [… 25 tokens …] b" in text, "420 letters and the 5 before them, of which 400 are shown"


def test_pictures_are_small(tmp_path, noted):
    save_vision_model(tmp_path / "model", "qwen2_5_vl")
    stream = io.BytesIO()
    Image.new("RGB", (40, 16), "red").save(stream, "PNG")
    part = {"type": "image", "base64": base64.b64encode(stream.getvalue()).decode()}
    rows = write_jsonl(tmp_path / "rows.jsonl", [chat([part] * 10 + [{"type": "text", "text": "which?"}], "red")])
    facts, _, _ = noted(tmp_path / "model", train_datasets=[str(rows)], max_length=256)
    (sample,) = facts["samples"]
    assert len(sample["images"]) == 8
    picture = Image.open(io.BytesIO(base64.b64decode(sample["images"][0].removeprefix("data:image/png;base64,"))))
    assert picture.size == (40, 16)
    assert picture.getpixel((3, 3)) == pytest.approx((255, 0, 0), abs=2)


def test_rows_that_cannot_be_shown_end_no_run(tmp_path, model_dir, noted, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("burnish"), "propagate", True)
    store = write_jsonl(tmp_path / "store.jsonl", [row([4, 5, 6], [0, 1, 1])])
    whole, _, parts = noted(model_dir, pretokenized_dataset_paths=[str(store)])
    assert len(whole["samples"]) == 1

    def broken():
        raise RuntimeError("no such tokenizer")

    write_facts(tmp_path, **parts | {"tokenizer": broken})
    facts = json.loads((tmp_path / "data.json").read_text())
    assert (facts["sources"], facts["samples"]) == (whole["sources"], [])
    assert "no rows are kept for the report: no such tokenizer" in caplog.text


def test_no_tokenizer_is_read_where_no_row_is_shown(tmp_path, caplog):
    def unread():
        raise AssertionError

    write_facts(tmp_path, stores=[], evals={}, tokenizer=unread, reader=unread, image_token_id=None, seed=1)
    assert json.loads((tmp_path / "data.json").read_text()) == {"sources": [], "eval_sources": [], "samples": []}
    assert caplog.messages == []
