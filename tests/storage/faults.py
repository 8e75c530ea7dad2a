"""A proxy in front of a real object store that fails as it is told, and counts what it was asked.

A fault takes the place of a reply: it is called with ``fetch``, which asks the store, and gives the reply that the client gets.
"""

import http.client
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from typing import Any

import pytest

from tests.storage.servers import Bucket, s3_environment

_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    kind: str
    """``list``, ``get``, ``head``, ``put``, ``post`` or ``delete``."""
    bucket: str
    key: str
    query: dict[str, str]
    range: str | None
    access_key: str | None
    at: float
    """Seconds, of the monotonic clock."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    announced: int
    """What Content-Length says."""


Fetch = Callable[[], Reply]
Fault = Callable[[Fetch], Reply]


def answer(status: int, code: str, **headers: str) -> Fault:
    """An error of S3 in place of the object; ``x_amz_bucket_region="eu-west-1"`` is a header."""
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()
    )
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: Reply(status, {"Content-Type": "application/xml"} | named, body, len(body))


def cut(size: int) -> Fault:
    """The headers of the whole, ``size`` bytes of it, and the end of the connection."""

    def apply(fetch: Fetch) -> Reply:
        reply = fetch()
        return replace(reply, body=reply.body[:size])

    return apply


def changed(change: Callable[[bytes], bytes]) -> Fault:
    """Another body, whose length fits."""

    def apply(fetch: Fetch) -> Reply:
        reply = fetch()
        body = change(reply.body)
        return replace(reply, body=body, announced=len(body))

    return apply


def flip(position: int) -> Fault:
    """One byte is another one."""
    return changed(lambda body: body[:position] + bytes([body[position] ^ 1]) + body[position + 1 :])


def delay(seconds: float) -> Fault:
    def apply(fetch: Fetch) -> Reply:
        time.sleep(seconds)
        return fetch()

    return apply


def after(action: Callable[[], object]) -> Fault:
    """``action`` comes before the store is asked."""

    def apply(fetch: Fetch) -> Reply:
        action()
        return fetch()

    return apply


def reset(fetch: Fetch) -> Reply:
    """The connection is reset before a byte of the reply."""
    raise ConnectionResetError


@dataclass
class _Rule:
    fault: Fault
    kind: str
    where: Callable[[Request], bool]
    skip: int
    left: float


@dataclass
class FaultProxy:
    """``url`` stands for the server behind it."""

    upstream: str
    url: str
    requests: list[Request] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of object bodies that were sent, by key."""
    _rules: list[_Rule] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on(
        self,
        kind: str,
        fault: Fault,
        *,
        where: Callable[[Request], bool] = lambda _: True,
        skip: int = 0,
        times: float = inf,
    ) -> None:
        """Apply ``fault`` to ``times`` of the requests ``where`` it fits, after the first ``skip`` of them."""
        self._rules.append(_Rule(fault, kind, where, skip, times))

    def heal(self) -> None:
        """No faults from now on, and nothing counted yet."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()
            self.sent.clear()

    def count(self, kind: str, key: str | None = None) -> int:
        return sum(request.kind == kind and key in (None, request.key) for request in self.requests)

    def faults_for(self, request: Request) -> list[Fault]:
        """Note ``request`` and take what is meant for it."""
        found = []
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.kind != request.kind or not rule.where(request) or rule.left <= 0:
                    continue
                if rule.skip:
                    rule.skip -= 1
                else:
                    rule.left -= 1
                    found.append(rule.fault)
        return found

    def note_sent(self, request: Request, size: int) -> None:
        with self._lock:
            self.sent[request.key] = self.sent.get(request.key, 0) + size


@pytest.fixture
def faulty(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """What the environment names as the S3 server of ``s3_bucket``; puts of the bucket itself go past it."""
    with faults(s3_bucket.server) as proxy:
        for name, value in s3_environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gives up after a second, not after minutes."""
    from burnish.storage import bucket

    backoff = {"init_backoff": timedelta(seconds=0.05), "max_backoff": timedelta(seconds=0.2), "base": 2}
    monkeypatch.setitem(bucket.RETRIES, "max_retries", 2)
    monkeypatch.setitem(bucket.RETRIES, "backoff", backoff)
    monkeypatch.setattr(bucket, "BODY_TRIES", 2)


@contextmanager
def faults(upstream: str) -> Iterator[FaultProxy]:
    """A proxy for the server at ``upstream``."""

    class Handler(_Handler):
        proxy: FaultProxy

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Handler.proxy = FaultProxy(upstream, f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield Handler.proxy
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: FaultProxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = self._request(body)
        fetch: Fetch = lambda: self._fetch(body)  # noqa: E731
        for fault in self.proxy.faults_for(request):
            fetch = _bound(fault, fetch)
        try:
            self._send(request, fetch())
        except ConnectionError:  # a fault's, or the client was killed
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def _request(self, body: bytes) -> Request:
        url = urllib.parse.urlsplit(self.path)
        bucket, _, key = url.path.lstrip("/").partition("/")
        kind = "list" if self.command == "GET" and not key else self.command.lower()
        if self.command == "POST" and url.query == "delete":  # of several objects, here always of one
            kind, key = "delete", re.findall("<Key>(.*?)</Key>", body.decode())[0]
        _, _, credential = self.headers.get("Authorization", "").partition("Credential=")
        return Request(
            kind,
            bucket,
            urllib.parse.unquote(key),
            dict(urllib.parse.parse_qsl(url.query)),
            self.headers.get("Range"),
            credential.partition("/")[0] or None,
            time.monotonic(),
        )

    def _fetch(self, body: bytes) -> Reply:
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.proxy.upstream).netloc, timeout=60)
        signed = "Credential=" in self.headers.get("Authorization", "")  # with the client's Host
        own = {"connection"} if signed else {"connection", "host"}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in own}
        try:
            connection.request(self.command, self.path, body or None, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        kept = {name: value for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP}
        announced = int(response.headers.get("Content-Length", len(content)))
        return Reply(response.status, kept, content, announced)

    def _send(self, request: Request, reply: Reply) -> None:
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(reply.announced))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)
        if request.kind == "get" and reply.status in (200, 206):
            self.proxy.note_sent(request, len(reply.body))
        if len(reply.body) != reply.announced:
            self.close_connection = True


def _bound(fault: Fault, fetch: Fetch) -> Fetch:
    return lambda: fault(fetch)
