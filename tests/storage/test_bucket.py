"""A bucket answers to the credentials that its user has, and to keys as they are."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import obstore
import pytest

from burnish.errors import StorageError
from burnish.storage.bucket import open_bucket
from tests.storage.faults import answer, reset
from tests.storage.published import marked, pairs, publish, rows_at
from tests.storage.servers import KEYS, _s3_client

X = marked(1, 20)


def keys_used(proxy) -> list[str | None]:
    return [request.access_key for request in proxy.requests]


def without_keys(monkeypatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)


def test_a_profile_by_its_name(s3_bucket, faulty, tmp_path, monkeypatch):
    uri = publish(s3_bucket, "tok", [X])
    without_keys(monkeypatch)
    (tmp_path / "config").write_text(
        f"[profile second]\naws_access_key_id = AKSECOND\naws_secret_access_key = {KEYS['AKSECOND']}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "second")
    assert rows_at(uri) == pairs(X)
    assert set(keys_used(faulty)) == {"AKSECOND"}


def test_a_profile_that_is_not_there(s3_bucket, monkeypatch):
    without_keys(monkeypatch)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StorageError, match=rf"s3://{s3_bucket.name}.*: no credentials were found .*nobody"):
        rows_at(s3_bucket.uri("tok"))


def test_a_public_bucket_is_asked_without_a_signature(s3_bucket, faulty, monkeypatch):
    without_keys(monkeypatch)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    faulty.on("list", answer(200, "nothing"))
    with pytest.raises(Exception, match=s3_bucket.uri("tok")):
        rows_at(s3_bucket.uri("tok"))
    assert set(keys_used(faulty)) == {None}


@contextmanager
def identity(lifetimes: dict[str, timedelta]) -> Iterator[str]:
    """Where a container gets its keys: the next one each time, the last one for ever."""
    given = list(lifetimes.items())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key, lifetime = given.pop(0) if len(given) > 1 else given[0]
            expires = (datetime.now(UTC) + lifetime).strftime("%Y-%m-%dT%H:%M:%SZ")
            facts = {"AccessKeyId": key, "SecretAccessKey": KEYS[key], "Token": "", "Expiration": expires}
            body = json.dumps(facts).encode()
            self.send_response_only(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/keys"
        finally:
            server.shutdown()
            thread.join()


def test_keys_of_a_container_are_renewed_before_they_expire(s3_bucket, faulty, tmp_path, monkeypatch):
    """As in a run of days: the keys of its first hour are not those it ends with."""
    publish(s3_bucket, "tok", [X])
    without_keys(monkeypatch)
    (tmp_path / "token").write_text("of the container")
    with identity({"AKFIRST": timedelta(minutes=1), "AKSECOND": timedelta(hours=1)}) as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        bucket, key = open_bucket(s3_bucket.uri("tok"))
        (found,) = bucket.list(key)
        time.sleep(0.2)  # the client asks for keys no more than ten times a second
        assert b"".join(bucket.read(found)) == s3_bucket.get(found.key)
    assert keys_used(faulty)[0] == "AKFIRST"
    assert keys_used(faulty)[-1] == "AKSECOND"


def test_an_object_in_parts_has_an_etag_that_is_no_md5(s3_bucket):
    """As large uploads do."""
    publish(s3_bucket, "made", [X])
    body = s3_bucket.get("made/part-000.parquet")
    client = _s3_client(s3_bucket.server, s3_bucket.name)
    obstore.put(client, "tok/a.parquet", body, use_multipart=True, chunk_size=5 << 20)
    assert rows_at(s3_bucket.uri("tok")) == pairs(X)


@pytest.mark.parametrize("uri", ["s3:///tok", "ftp://bkt/tok", "s3://bkt/a//b", "gs://bkt/../x", "s3://bkt/./x"])
def test_what_is_no_place_is_refused_before_anybody_is_asked(no_clouds, uri):
    with pytest.raises(StorageError, match=r"is no place that is read|empty part, \. or \.\. in its key"):
        open_bucket(uri)


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"type": "service_account", "private_key": "x"}'])
def test_credentials_that_cannot_be_used_are_named(no_clouds, monkeypatch, tmp_path, text):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKFIRST")
    with pytest.raises(StorageError, match=r"s3://half: its credentials cannot be used \(.*SecretAccessKey"):
        open_bucket("s3://half/tok")
    (tmp_path / "key.json").write_text(text)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(StorageError, match="gs://half"):
        open_bucket("gs://half/tok")


def test_an_endpoint_without_a_scheme_is_named(s3_bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(StorageError, match=r"AWS_ENDPOINT_URL=127\.0\.0\.1:9000: is no address"):
        open_bucket(s3_bucket.uri("tok"))


def test_a_new_object_takes_nobodys_place(s3_bucket):
    bucket, _ = open_bucket(s3_bucket.uri())
    bucket.write("a", b"first", new=True)
    with pytest.raises(StorageError, match="a: is there already"):
        bucket.write("a", b"second", new=True)
    assert s3_bucket.get("a") == b"first"
    bucket.write("a", b"third")
    assert s3_bucket.get("a") == b"third"


def test_a_write_that_may_pass_is_tried_again(s3_bucket, faulty, impatient, tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 1000)
    bucket, _ = open_bucket(s3_bucket.uri())
    for fault in (answer(503, "SlowDown"), reset):
        faulty.on("put", fault, times=1)
        bucket.write("a", tmp_path / "file")
        assert s3_bucket.get("a") == b"x" * 1000
        s3_bucket.delete("a")


def test_a_write_that_is_denied_says_so(s3_bucket, faulty):
    bucket, _ = open_bucket(s3_bucket.uri())
    faulty.on("put", answer(403, "AccessDenied"))
    with pytest.raises(StorageError, match=r"tok/a: access is denied \(403 AccessDenied\)"):
        bucket.write("tok/a", b"x")
    assert faulty.count("put") == 1
