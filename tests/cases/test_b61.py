"""B61: credentials that expire are read again; denied, elsewhere and missing are told apart, after few requests."""

import os
import re
import threading
from pathlib import Path

import pytest

from burnish.errors import BurnishError, StorageError
from tests.runs.commands import burnish
from tests.storage.faults import Fetch, Reply, Request, answer
from tests.storage.published import in_cache, marked, pairs, publish, rows_at
from tests.storage.servers import KEYS, OUTSIDER, s3_environment

NUM_SHARDS = 30
SHARDS = [marked(number) for number in range(NUM_SHARDS)]
ROWS = [pair for shard in SHARDS for pair in pairs(shard)]
FEW = 40
"""Requests until it is clear that nothing will come: those on the way, and no more."""


def use_profile(file: Path, key: str) -> None:
    new = file.with_suffix(f".{threading.get_ident()}")
    new.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {KEYS[key]}\n")
    new.replace(file)


def with_first_key(request: Request) -> bool:
    return request.access_key == "AKFIRST"


@pytest.fixture
def profile(faulty, tmp_path, monkeypatch) -> Path:
    """The credentials are in a file, as those that a login renews."""
    file = tmp_path / "credentials"
    use_profile(file, "AKFIRST")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    return file


def test_credentials_that_expire_half_way_are_read_again(s3_bucket, faulty, profile):
    uri = publish(s3_bucket, "tok", SHARDS)

    def renew(_: Fetch) -> Reply:
        use_profile(profile, "AKSECOND")
        return answer(400, "ExpiredToken")(_)

    faulty.on("get", renew, where=with_first_key, skip=3)
    assert rows_at(uri) == ROWS
    assert {request.access_key for request in faulty.requests} == {"AKFIRST", "AKSECOND"}
    assert faulty.sent == {key: len(s3_bucket.get(key)) for key in s3_bucket.keys("tok")}
    assert len(faulty.requests) <= NUM_SHARDS + FEW


def test_credentials_that_stay_expired_are_an_error_and_nothing_is_lost(s3_bucket, faulty, profile):
    uri, cache = publish(s3_bucket, "tok", SHARDS), Path(os.environ["BURNISH_CACHE"])
    faulty.on("get", answer(400, "ExpiredToken"), where=with_first_key, skip=20)
    with pytest.raises(StorageError, match=r"part-\d+\.parquet: the credentials have expired.*ExpiredToken"):
        rows_at(uri)
    assert len(faulty.requests) <= 20 + FEW
    assert in_cache(cache) == []
    whole = {f"tok/{path.name}": path.stat().st_size for path in cache.rglob("part-*.parquet")}
    assert len(whole) >= 12
    use_profile(profile, "AKSECOND")
    assert rows_at(uri) == ROWS
    assert {key: faulty.sent[key] for key in whole} == whole


REFUSALS = {
    "denied": (answer(403, "AccessDenied"), "access is denied (403 AccessDenied)"),
    "elsewhere": (answer(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"), "is in another region"),
    "signed for elsewhere": (answer(400, "AuthorizationHeaderMalformed"), "is in another region"),
    "missing": (answer(404, "NoSuchBucket"), "there is no bucket"),
    "expired": (answer(400, "ExpiredToken"), "the credentials have expired"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_listing_says_why(s3_bucket, faulty, name):
    uri = publish(s3_bucket, "tok", SHARDS[:2])
    fault, words = REFUSALS[name]
    faulty.on("list", fault)
    with pytest.raises(StorageError, match=re.escape(words)) as caught:
        rows_at(uri)
    assert uri in str(caught.value)
    assert sum(text in str(caught.value) for text in {text for _, text in REFUSALS.values()}) == 1
    assert len(faulty.requests) <= 3
    assert in_cache(Path(os.environ["BURNISH_CACHE"])) == []


@pytest.mark.parametrize("name", ["denied", "elsewhere"])
def test_a_refused_object_says_why(s3_bucket, faulty, name):
    uri = publish(s3_bucket, "tok", SHARDS)
    fault, words = REFUSALS[name]
    faulty.on("get", fault, skip=3)
    with pytest.raises(StorageError, match=rf"part-\d+\.parquet: .*{re.escape(words)}"):
        rows_at(uri)
    assert len(faulty.requests) <= FEW
    assert in_cache(Path(os.environ["BURNISH_CACHE"])) == []
    assert faulty.count("get") < NUM_SHARDS


def test_what_the_server_itself_refuses(s3_bucket, monkeypatch):
    """Without a proxy: keys that may nothing, keys it does not know, a bucket and a folder that are not there."""
    uri = publish(s3_bucket, "tok", SHARDS[:1])
    with pytest.raises(BurnishError, match=f"{uri}k: "):
        rows_at(f"{uri}k")
    with pytest.raises(StorageError, match="there is no bucket s3://none-of-that-name") as caught:
        rows_at("s3://none-of-that-name/tok")
    assert "NoSuchBucket" in str(caught.value)
    for key, secret, said in (
        (*OUTSIDER, "access is denied (403 AccessDenied)"),
        ("AKNONE", "x", "the credentials are not valid (403 InvalidAccessKeyId)"),
    ):
        other = publish(s3_bucket, key, SHARDS[:1])
        for name, value in s3_environment(s3_bucket.server, key=key, secret=secret).items():
            monkeypatch.setenv(name, value)
        forget_clients()
        with pytest.raises(StorageError, match=re.escape(said)):
            rows_at(other)


def forget_clients() -> None:
    from burnish.storage import bucket

    bucket._bucket.cache_clear()


def test_the_command_ends_with_2_and_one_message(s3_bucket, faulty, tmp_path):
    uri = publish(s3_bucket, "tok", SHARDS[:2])
    faulty.on("list", answer(403, "AccessDenied"))
    done = burnish("inspect", "stats", uri, folder=tmp_path)
    assert done.returncode == 2
    assert "access is denied (403 AccessDenied)" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(faulty.requests) <= 4
