"""What every rank opens is the same, or the run does not begin."""

import logging
import platform
import tempfile
from functools import partial
from pathlib import Path

import pytest

from burnish.assemble.data import open_train
from burnish.assemble.dummy import MemorySpoken
from burnish.assemble.model import require_valid
from burnish.assemble.run import open_data
from burnish.backends.comm import joined
from burnish.config import SFTConfig
from burnish.errors import DataError
from burnish.storage import cache
from burnish.train.callbacks import Requests
from burnish.train.progress import Progress
from tests.ranks import on_ranks
from tests.toys import chat, write_jsonl


def open_here(model_dir: str, paths: list[str], **keys):
    """The first rank opens the first of ``paths`` and so on; what it was, or the error."""
    with joined("cpu") as ranks:
        config = SFTConfig(model={"path": model_dir}, num_workers=0, **{"train_datasets": [paths[ranks.rank]], **keys})
        try:
            (store,), _ = open_data(config, require_valid(config), ranks)
        except DataError as error:
            return str(error)
        return store.fingerprint


def open_privately(model_dir: str, path: str, temporary: str) -> list[str]:
    tempfile.tempdir = temporary
    share_nothing()
    try:
        said = open_here(model_dir, [path] * 2, disable_cache=True)
        assert said.isalnum(), f"a fingerprint, and no error: {said}"
    finally:
        tempfile.tempdir = None
        share_nothing()
    return sorted(str(found) for found in Path(temporary).rglob("*.arrow"))


def share_nothing() -> None:
    """These processes are used again."""
    cache._shared.clear()


@pytest.fixture
def chats(tmp_path):
    return str(write_jsonl(tmp_path / "chats.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(6)]))


def test_ranks_open_the_same_rows(tmp_path, model_dir, chats):
    keys = {"cache_dir": str(tmp_path / "cache")}
    config = SFTConfig(model={"path": str(model_dir)}, num_workers=0, train_datasets=[chats], **keys)
    (store,) = open_train(config, require_valid(config))
    found = on_ranks(2, partial(open_here, **keys), str(model_dir), [chats, chats])
    assert found == [store.fingerprint] * 2


def test_other_rows_on_another_rank_end_the_run_on_all(tmp_path, model_dir, chats):
    other = str(write_jsonl(tmp_path / "other.jsonl", [chat(f"question {n}", f"answer {n}!") for n in range(6)]))
    found = on_ranks(2, partial(open_here, cache_dir=str(tmp_path / "cache")), str(model_dir), [chats, other])
    for said, path in zip(found, (chats, other), strict=True):
        assert f"{path}: holds other rows on rank 1 ({platform.node()}) than on rank 0 ({platform.node()})" in said
        assert "copy it to every node anew" in said


def test_without_a_cache_a_node_has_one_private_folder(tmp_path, model_dir, chats):
    (tmp_path / "tmp").mkdir()
    found = on_ranks(2, open_privately, str(model_dir), chats, str(tmp_path / "tmp"))
    assert found[0] == found[1]
    assert len({Path(file).relative_to(tmp_path / "tmp").parts[0] for file in found[0]}) == 1
    assert len([file for file in found[0] if "rows-" in file]) == 1, "one of them has tokenized"


def peak_said(peaks: list[float]) -> list[str]:
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("burnish.assemble.dummy")
    log.addHandler(handler)
    log.setLevel("INFO")
    try:
        with joined("cpu") as ranks:
            spoken = MemorySpoken(ranks)
            for peak in (peaks[ranks.rank], 0.5):
                spoken.on_log(Progress(), Requests(), metrics={"train/memory_peak_gib": peak})
            spoken.on_train_end(Progress(step=3), Requests())
    finally:
        log.removeHandler(handler)
    return said


def test_a_dummy_run_tells_the_peak_of_the_rank_that_held_most():
    said = ["the dummy run's 3 steps held at most 7.25 GiB on a rank"]
    assert on_ranks(2, peak_said, [1.0, 7.25]) == [said, said]
