"""A dataset becomes a store that says what it is, or an error that says why not."""

import numpy as np
import pyarrow as pa
import pytest

from burnish.config.choices import Truncation
from burnish.data.manifest import MANIFEST_NAME
from burnish.data.store import open_store
from burnish.data.tokenize import TokenizerSettings
from burnish.data.write import SCHEMA, write_store
from burnish.errors import DataError
from tests.data.tokenizing import load, manifest_of, rows_of, store
from tests.toys import chat, write_jsonl

ROWS = [chat("q", "a"), chat("q", ""), chat("q" * 60, "ab"), {"messages": []}]


def write(file, model, out):
    keys = {"messages_key": None, "tools_key": None, "system_key": None}
    settings = TokenizerSettings(str(model), max_length=64)
    keys |= {"cache_dir": None, "force_recache": False, "disable_cache": False}
    write_store(str(file), split=None, tokenizer_settings=settings, num_workers=0, out=str(out), **keys)
    return out


def test_the_manifest_counts_every_row(model_dir, tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", ROWS)
    folder = store(file, model=model_dir, cache=tmp_path / "cache", max_length=64)
    manifest, tokenizer = manifest_of(folder), load(model_dir)
    (shard,) = folder.glob("*.arrow")
    with pa.memory_map(str(shard)) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.schema == SCHEMA
    assert (manifest.rows, manifest.rows_read) == (1, 4)
    assert manifest.dropped == {"empty_reply": 1, "no_target": 1, "no_assistant": 1}
    assert manifest.drop_examples["no_target"].startswith(f"{file}, line 3: 83 tokens, no target in the first 64")
    assert manifest.tokens == len(table["input_ids"][0]) == 23
    assert manifest.targets == sum(table["loss_mask"][0].as_py()) == 2
    assert (manifest.tokenizer_hash, manifest.template_hash) == (tokenizer.tokenizer_hash, tokenizer.template_hash)
    assert (manifest.vocabulary_size, manifest.max_length) == (103, 64)
    assert manifest.special_tokens["eos_token"] == "<|im_end|>"
    assert manifest.train_on_what == "last_assistant_message"
    assert set(manifest.checksums) == {shard.name}


def test_into_a_folder_of_your_own(model_dir, tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", ROWS)
    out = write(file, model_dir, tmp_path / "new" / "out")
    assert sorted(entry.name for entry in out.iterdir()) == [MANIFEST_NAME, "rows-00000.arrow"]
    with pytest.raises(DataError, match="3 of 3 rows dropped"):
        write(write_jsonl(tmp_path / "bad.jsonl", ROWS[1:]), model_dir, tmp_path / "new" / "bad")
    assert list(out.parent.iterdir()) == [out], "nothing lies beside it, whatever became of it"
    with pytest.raises(DataError, match="is not empty"):
        write(file, model_dir, out)
    (tmp_path / "empty").mkdir()
    assert rows_of(write(file, model_dir, tmp_path / "empty")) == rows_of(out)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([chat("q", "a")] * 3, "3 of 3 rows dropped: 3 too_long"),
        (
            [chat("q", "a"), chat("q", ""), {"messages": []}],
            "3 of 3 rows dropped: 1 too_long, 1 empty_reply, 1 no_assistant",
        ),
    ],
)
def test_nothing_left_is_an_error_with_the_totals(model_dir, tmp_path, rows, message):
    file = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(DataError, match=message):
        store(file, model=model_dir, cache=tmp_path, max_length=5, truncation=Truncation.DROP)


def test_no_rows_at_all(model_dir, tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", ROWS)
    with pytest.raises(DataError, match=r"train\[:0\]: has no rows"):
        store(file, model=model_dir, cache=tmp_path, split="train[:0]")


def test_a_row_that_is_too_long_can_stop_the_run(model_dir, tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", ROWS)
    with pytest.raises(DataError, match=r"row 2 \(.*line 3\): max_length=64: the row has 83 tokens"):
        store(file, model=model_dir, cache=tmp_path, max_length=64, truncation=Truncation.ERROR)


@pytest.mark.parametrize(
    ("row", "message", "fix"),
    [
        ({"input_ids": [1], "loss_mask": [0]}, "the columns are input_ids, loss_mask", "pretokenized_dataset_paths"),
        ({"text": "x"}, "no chat, prompt or Alpaca rows; the columns are text", "store messages"),
    ],
)
def test_rows_of_another_kind(model_dir, tmp_path, row, message, fix):
    with pytest.raises(DataError, match=message) as caught:
        store(write_jsonl(tmp_path / "x.jsonl", [row]), model=model_dir, cache=tmp_path)
    assert fix in caught.value.fix


@pytest.mark.parametrize("key", ["messages_key", "tools_key", "system_key"])
def test_a_given_column_must_exist(model_dir, tmp_path, key):
    file = write_jsonl(tmp_path / "x.jsonl", [chat("q", "a"), {**chat("q", "a"), "late": None}])
    with pytest.raises(DataError, match=f"{key}='nope'"):
        store(file, model=model_dir, cache=tmp_path, **{key: "nope"})
    if key != "messages_key":
        assert store(file, model=model_dir, cache=tmp_path, **{key: "late"}).is_dir()


def test_a_changed_byte_of_a_local_store_is_found_by_its_manifest(model_dir, tmp_path):
    out = write(write_jsonl(tmp_path / "x.jsonl", ROWS), model_dir, tmp_path / "out")
    assert len(open_store(out, name="s")) == 1
    (shard,) = out.glob("*.arrow")
    data = bytearray(shard.read_bytes())
    token = data.index(np.array(open_store(out, name="s")[0].input_ids[:4]).tobytes())
    data[token] ^= 1  # another token of the vocabulary: nothing else could tell
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"rows-00000\.arrow: differs from the checksum in its manifest"):
        open_store(out, name="s")
