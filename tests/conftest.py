"""Fixtures for all tests. Tests never reach a network and run on one thread."""

import logging
import os
import sys
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
from hypothesis import settings

from tests.storage.faults import faulty, impatient  # noqa: F401
from tests.storage.servers import google_bucket, google_server, no_clouds, s3_bucket, s3_server  # noqa: F401
from tests.toys import save_model
from tests.train.places import mlflow_server, services_here, trackio_dir  # noqa: F401

settings.register_profile("burnish", deadline=None)  # no test fails because a machine is slow
settings.load_profile("burnish")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3 with TK and template T1; read-only."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _no_groups_left() -> Iterator[None]:
    """A test whose process was a rank leaves no threads behind."""
    yield
    if "burnish.backends.comm" in sys.modules:
        from tests.ranks import forget_groups

        forget_groups()


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A command that ran in this process sends the log to a stream that is closed by now."""
    logger = logging.getLogger("burnish")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a cache of its own."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
