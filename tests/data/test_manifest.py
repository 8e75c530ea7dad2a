"""A manifest that cannot be trusted is named, not guessed at."""

import json

import pytest

from burnish.data.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, read_manifest, require_same, write_manifest
from burnish.errors import DataError
from burnish.storage.files import describe_file

FACTS = {"rows": 1, "rows_read": 2, "dropped": {"no_target": 1}, "drop_examples": {}, "tokens": 3, "targets": 2}
FACTS |= {"tokenizer_hash": "a", "template_hash": "b", "vocabulary_size": 9, "special_tokens": {}, "max_length": None}
MANIFEST = Manifest(**FACTS, train_on_what="all_assistant_messages", notices=(), checksums={})


def test_it_reads_back(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    assert json.loads((tmp_path / MANIFEST_NAME).read_text())["format_version"] == FORMAT_VERSION
    assert read_manifest(describe_file(tmp_path / MANIFEST_NAME)).dropped == {"no_target": 1}


@pytest.mark.parametrize("text", ['{"rows": 1, "rows_r', "[]", '{"rows": 1}', '{"more": 1}', ""])
def test_a_damaged_one_is_named(tmp_path, text):
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(DataError, match=rf"{MANIFEST_NAME}: is no manifest of a store"):
        read_manifest(describe_file(tmp_path / MANIFEST_NAME))


def test_another_format_is_refused(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    file = tmp_path / MANIFEST_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 99}))
    with pytest.raises(DataError, match=f"has format 99; this version reads {FORMAT_VERSION}"):
        read_manifest(describe_file(tmp_path / MANIFEST_NAME))


def test_all_that_differs_from_the_model_is_shown(tmp_path):
    require_same("store", MANIFEST, tokenizer_hash="a", template_hash="b", vocabulary_size=9)
    with pytest.raises(DataError, match=r"template_hash b in the store, c of the model; vocabulary_size 9 .*, 8 of"):
        require_same("store", MANIFEST, tokenizer_hash="a", template_hash="c", vocabulary_size=8)
