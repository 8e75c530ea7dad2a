"""B08: an object that comes short is fetched again, and what stays short counts as nothing.

Streams that are cut on disk are in tests/data/test_formats.py.
"""

import os
from pathlib import Path

import pytest

from burnish.errors import DataError, StorageError
from tests.data.stores import to_table, write_arrow
from tests.storage.faults import answer, cut
from tests.storage.published import in_cache, marked, pairs, publish, rows_at

ROWS = marked(5, 20)
KINDS = ["arrow stream", "jsonl"]
"""Half of one of these can be read as a shorter one."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_body_is_fetched_again(s3_bucket, faulty, kind):
    uri = publish(s3_bucket, "tok", [ROWS], kind=kind)
    faulty.on("get", cut(60), times=1)
    assert rows_at(uri) == pairs(ROWS)
    assert faulty.count("get") == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_stays_short_is_an_error_and_no_store(s3_bucket, faulty, impatient, kind):
    uri, cache = publish(s3_bucket, "tok", [ROWS], kind=kind), Path(os.environ["BURNISH_CACHE"])
    faulty.on("get", cut(60))
    with pytest.raises(StorageError, match=rf"{uri}/part-000\.\w+: cannot be had"):
        rows_at(uri)
    assert 2 <= faulty.count("get") <= 20
    assert in_cache(cache) == []
    faulty.heal()
    assert rows_at(uri) == pairs(ROWS)


def test_a_page_in_place_of_the_object_is_no_object(s3_bucket, faulty, impatient):
    """Status 200, as of a proxy that asks to log in: the size that was listed is not the size that came."""
    uri, cache = publish(s3_bucket, "tok", [ROWS], kind="jsonl"), Path(os.environ["BURNISH_CACHE"])
    faulty.on("get", answer(200, "Welcome"))
    with pytest.raises(StorageError, match=r"part-000\.jsonl"):
        rows_at(uri)
    assert in_cache(cache) == []


def test_a_stream_that_is_cut_in_the_bucket_is_named(s3_bucket, tmp_path):
    """Its size is right: it was uploaded like that."""
    file = write_arrow(tmp_path / "a.arrow", to_table(ROWS), kind="arrow stream", chunk=10)
    s3_bucket.put("tok/a.arrow", file.read_bytes()[:-8])
    with pytest.raises(DataError, match=rf"{s3_bucket.uri('tok')}/a\.arrow: is cut short"):
        rows_at(s3_bucket.uri("tok"))
