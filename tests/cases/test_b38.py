"""B38: a listing is whole or an error, never a smaller store."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import pytest

from burnish.errors import StorageError
from burnish.storage import bucket
from burnish.storage.files import list_files
from tests.storage.faults import FaultProxy, Request, answer, changed, cut, faults, reset
from tests.storage.published import in_cache, rows_at
from tests.storage.servers import Bucket, s3_environment

NUM_OBJECTS = 1203
"""A page holds 1000."""


@pytest.fixture(scope="module")
def many(s3_server: str) -> Bucket:
    """Read-only."""
    bucket = Bucket("s3", s3_server, "many-objects")

    def put(number: int) -> None:
        bucket.put(f"tok/{number:04}.jsonl", b'{"input_ids": [%d, 1], "loss_mask": [0, 1]}\n' % number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(NUM_OBJECTS)))
    return bucket


@pytest.fixture
def proxy(many: Bucket, no_clouds: None, impatient: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    bucket._bucket.cache_clear()  # of another test's proxy
    with faults(many.server) as proxy:
        for name, value in s3_environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy


def second_page(request: Request) -> bool:
    return "continuation-token" in request.query


def after_an_entry(body: bytes) -> bytes:
    return body[: body.index(b"</Contents>") + len(b"</Contents>")]


FAULTS = {
    "throttled": answer(503, "SlowDown"),
    "reset": reset,
    "ends early": cut(300),
    "ends early, after an entry": changed(after_an_entry),
    "cut XML": changed(lambda body: body[: len(body) // 2]),
    "nothing": changed(lambda _: b""),
}


def test_all_of_them_are_read(many, proxy, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", many.server)
    assert [ids[0] for ids, _ in rows_at(many.uri("tok"))] == list(range(NUM_OBJECTS))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_page_that_fails_once_is_asked_again(many, proxy, fault):
    proxy.on("list", fault, where=second_page, times=1)
    assert [file.name for file in list_files(many.uri("tok"))] == [f"{n:04}.jsonl" for n in range(NUM_OBJECTS)]
    assert 4 <= proxy.count("list") <= 5


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_page_that_fails_always_is_an_error(many, proxy, fault):
    proxy.on("list", fault, where=second_page)
    with pytest.raises(StorageError, match="s3://many-objects/tok: "):
        rows_at(many.uri("tok"))
    assert proxy.count("list") <= 12
    assert proxy.count("get") == 0
    assert in_cache(Path(os.environ["BURNISH_CACHE"])) == []


@pytest.mark.parametrize("times", [1, inf])
def test_an_answer_that_is_no_page_does_not_end_the_listing(many, proxy, times):
    """With status 200, as of a gateway in the way."""
    proxy.on("list", answer(200, "Welcome"), where=second_page, times=times)
    assert len(list_files(many.uri("tok"))) == NUM_OBJECTS
