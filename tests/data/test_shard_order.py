"""Shards come in the order of their relative paths, however the folder or the bucket lists them."""

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from burnish.data.store import open_store
from burnish.storage import bucket
from burnish.storage.files import list_files
from tests.data.stores import contents
from tests.toys import row, write_jsonl

NAMES = ["Z.jsonl", "a.jsonl", "a/10.jsonl", "a/2.jsonl", "b/c/1.jsonl", "b0.jsonl"]
"""Sorted as text, character by character."""


@pytest.mark.parametrize("seed", range(5))
def test_a_folder(tmp_path, monkeypatch, seed):
    listed = Path.iterdir
    order = random.Random(seed)
    for number, name in enumerate(NAMES):
        write_jsonl(tmp_path / "store" / name, [row([number, number], [0, 1])])
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(order.sample(found := sorted(listed(folder)), len(found))))
    assert [file.name for file in list_files(tmp_path / "store")] == NAMES
    store = open_store(tmp_path / "store", name="s", disable_cache=True)
    assert contents(store) == [([number, number], [0, 1]) for number in range(len(NAMES))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.usefixtures("no_clouds")
def test_a_bucket(monkeypatch, seed):
    facts = {"size": 1, "e_tag": '"x"', "version": None, "last_modified": datetime(2026, 1, 1, tzinfo=UTC)}
    metas = [{"path": f"tok/{name}", **facts} for name in NAMES]
    random.Random(seed).shuffle(metas)
    monkeypatch.setattr(bucket, "_list_all", lambda store, key: metas)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert [file.name for file in list_files("s3://bucket-of-tests/tok")] == NAMES
