"""Where services keep runs in tests: a real MLflow server on loopback, and folders; nothing leaves this machine."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_ports

_START_SECONDS = 600


@pytest.fixture
def services_here(trackio_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment in which no service calls anybody."""
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRACKIO_DIR": str(trackio_dir),
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def trackio_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trackio reads where it is once, when it is imported."""
    return tmp_path_factory.mktemp("trackio")


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address; it has a database of its own."""
    folder = tmp_path_factory.mktemp("mlflow")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", f"{folder}/artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", *store, "--port", str(port), "--workers", "1"]
    log = folder / "log.txt"
    with log.open("wb") as out:
        environment = os.environ | {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # more processes, of no use here
        }
        # It has processes of its own, which end with the group.
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=folder, start_new_session=True)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"mlflow server did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False
