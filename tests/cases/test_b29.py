"""B29: a store that was replaced in its bucket is noticed, and nothing of the old one is trained."""

import os
from pathlib import Path

import pytest

from tests.storage.published import in_cache, marked, pairs, publish, rows_at
from tests.storage.servers import Bucket, _google

X, Y = marked(1), marked(2)


def test_without_a_flag_with_it_and_without_again(s3_bucket, faulty):
    uri = publish(s3_bucket, "tok", [X])
    assert rows_at(uri) == pairs(X)
    publish(s3_bucket, "tok", [Y])
    assert rows_at(uri) == pairs(Y)
    assert rows_at(uri, force_recache=True) == pairs(Y)
    faulty.heal()
    assert rows_at(uri) == pairs(Y)
    assert faulty.count("get") == 0


@pytest.mark.parametrize("kind", ["jsonl", "arrow file"])
def test_the_same_size_does_not_hide_it(s3_bucket, kind):
    uri = publish(s3_bucket, "tok", [X], kind=kind)
    size = len(s3_bucket.get(s3_bucket.keys()[0]))
    assert rows_at(uri) == pairs(X)
    publish(s3_bucket, "tok", [Y], kind=kind)
    assert len(s3_bucket.get(s3_bucket.keys()[0])) == size
    assert rows_at(uri) == pairs(Y)


@pytest.mark.parametrize("force", [False, True])
def test_fewer_shards_leave_none_of_the_old_behind(s3_bucket, force):
    uri = publish(s3_bucket, "tok", [X, X, X])
    assert rows_at(uri) == pairs(X) * 3
    publish(s3_bucket, "tok", [Y])
    for number in (1, 2):
        s3_bucket.delete(f"tok/part-00{number}.parquet")
    assert rows_at(uri, force_recache=force) == pairs(Y)
    assert rows_at(uri) == pairs(Y)


def test_one_new_shard_is_all_that_is_fetched(s3_bucket, faulty):
    uri = publish(s3_bucket, "tok", [X, X, X])
    assert rows_at(uri) == pairs(X) * 3
    faulty.heal()
    publish(s3_bucket, "more", [X, Y])
    s3_bucket.put("tok/part-001.parquet", s3_bucket.get("more/part-001.parquet"))
    assert rows_at(uri) == pairs(X) + pairs(Y) + pairs(X)
    assert list(faulty.sent) == ["tok/part-001.parquet"]


def test_a_slash_at_the_end_names_the_same(s3_bucket, faulty):
    uri = publish(s3_bucket, "tok", [X])
    assert rows_at(uri) == pairs(X)
    publish(s3_bucket, "tok2", [Y])
    assert rows_at(f"{uri}/") == pairs(X)
    assert faulty.count("get") == 1
    assert rows_at(f"{uri}2") == pairs(Y)


def test_s3_and_gs_of_equal_names_share_nothing(s3_bucket, google_server, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google_server)
    _google(google_server, "POST", "/storage/v1/b?project=test", f'{{"name": "{s3_bucket.name}"}}'.encode())
    other = Bucket("gs", google_server, s3_bucket.name)
    first, second = publish(s3_bucket, "tok", [X]), publish(other, "tok", [Y])
    assert first.removeprefix("s3") == second.removeprefix("gs")
    for _ in range(2):
        assert rows_at(first) == pairs(X)
        assert rows_at(second) == pairs(Y)
        assert rows_at(second.replace("gs://", "gcs://")) == pairs(Y)


def test_google_objects_of_the_same_size_are_told_apart(google_bucket):
    uri = publish(google_bucket, "tok", [X], kind="jsonl")
    assert rows_at(uri) == pairs(X)
    publish(google_bucket, "tok", [Y], kind="jsonl")
    assert rows_at(uri) == pairs(Y)
    assert len({name for name in in_cache(Path(os.environ["BURNISH_CACHE"])) if name.endswith(".jsonl")}) <= 2
