"""Several ranks save one checkpoint, find the same one, and end together when one of them fails."""

import json
import os
import platform
import resource
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from burnish.backends.comm import joined
from burnish.backends.fsdp.backend import FsdpBackend
from burnish.data.packing import Layout
from burnish.errors import BurnishError, CheckpointError
from burnish.train import checkpoint_folder
from burnish.train.cadence import Cadence
from burnish.train.checkpoint import Checkpointer, complete_checkpoints
from burnish.train.export import Exporter
from tests.ranks import on_ranks
from tests.storage.faults import answer
from tests.storage.servers import s3_environment
from tests.train.fakes import CountingBackend, Saved, make_trainer


class RankBackend(CountingBackend):
    """Each rank has a file of its own; ``fails`` at a step when it begins to save, or while it writes."""

    def __init__(self, rank, *, begins_badly_at=None, ends_badly_at=None):
        super().__init__()
        self._rank, self._begin, self._end = rank, begins_badly_at, ends_badly_at

    def save(self, folder):
        if self.weight == self._begin:
            raise OSError(28, "No space left on device")
        folder.mkdir(exist_ok=True)
        (folder / f"weight-{self._rank}.json").write_text(json.dumps(self.weight))
        return Late() if self.weight == self._end else Saved()

    def load(self, folder, *, weights_only=False):
        self.weight = json.loads((folder / f"weight-{self._rank}.json").read_text())

    def export(self, folder):
        if self._rank == 0:
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").write_text("weights")


class Late:
    done = True

    def wait(self):
        raise CheckpointError("backend", "could not be written: the disk is gone", fix="")


def train(place, *, failing=None, caches=(), server=None, nodes=False, exports="", **options):
    """(step it began at, steps it has done, error) of this rank, in a run of 6 steps."""
    with joined("cpu") as ranks, pytest.MonkeyPatch.context() as patch:
        if nodes:
            patch.setattr(platform, "node", lambda: f"node{ranks.rank}")
        if caches:
            patch.setenv("BURNISH_CACHE", caches[ranks.rank])
        for name, value in s3_environment(server).items() if server else ():
            patch.setenv(name, value)
        backend = RankBackend(ranks.rank, **(failing or {}).get(ranks.rank, {}))
        try:
            settings = {"num_steps": 6, "save_at": Cadence(2), "ranks": ranks, "backend": backend, "ckpt_path": place}
            if exports:
                settings["exporter"] = Exporter(exports, Cadence(6), ranks)
            trainer, _, _ = make_trainer(**(settings | options))
            began = trainer.progress.step
            trainer.train()
        except BurnishError as error:
            return None, backend.weight, str(error)
        return began, backend.weight, ""


def test_all_write_the_first_publishes_and_all_go_on_from_there(tmp_path):
    place = str(tmp_path / "ckpt")
    assert on_ranks(2, train, place) == [(0, 6, "")] * 2
    assert sorted(complete_checkpoints(place)) == [2, 4, 6]
    files = json.loads((tmp_path / "ckpt" / "global_step_4" / "COMPLETE").read_text())["files"]
    assert {"backend/weight-0.json", "backend/weight-1.json", "state.json"} <= files.keys()
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == [f"global_step_{step}" for step in (2, 4, 6)]
    more = partial(resume, num_steps=9)
    assert on_ranks(2, more, place) == [(6, 9, "")] * 2
    assert on_ranks(2, more, place) == [(9, 9, "")] * 2, "a finished run does nothing"
    assert sorted(complete_checkpoints(place)) == [2, 4, 6, 8, 9]


resume = partial(train, resume_from="latest")


@pytest.mark.parametrize(("how", "ranks"), [("begins_badly_at", [1]), ("ends_badly_at", [0, 1])])
def test_what_fails_on_one_rank_ends_all_with_its_reason_and_removes_nothing(tmp_path, how, ranks):
    place = str(tmp_path / "ckpt")
    # How writing ends, a backend tells all ranks.
    found = on_ranks(2, partial(train, failing={rank: {how: 4} for rank in ranks}), place)
    reason = {"begins_badly_at": "No space left on device", "ends_badly_at": "the disk is gone"}[how]
    assert [reason in error for _, _, error in found] == [True, True]
    assert len({weight for _, weight, _ in found}) == 1, "at the same step"
    assert sorted(complete_checkpoints(place)) == [2]
    assert on_ranks(2, resume, place) == [(2, 6, "")] * 2


@pytest.mark.parametrize("number", range(2))
def test_a_file_of_any_rank_that_was_changed_stops_all(tmp_path, number):
    place = str(tmp_path / "ckpt")
    on_ranks(2, train, place)
    (tmp_path / "ckpt" / "global_step_6" / "backend" / f"weight-{number}.json").write_text("7")
    for _, _, error in on_ranks(2, resume, place):
        assert f"weight-{number}.json: is not as it was written" in error


def test_what_differs_is_named_on_all(tmp_path):
    place = str(tmp_path / "ckpt")
    on_ranks(2, partial(train, run={"seed": 1, "batch_size": 4}), place)
    for _, weight, error in on_ranks(2, partial(resume, run={"seed": 2, "batch_size": 8}), place):
        assert "batch_size was 4, is 8; seed was 1, is 2" in error
        assert weight == 0


def test_nodes_without_a_common_disk_save_into_a_bucket(s3_bucket, tmp_path):
    s3_bucket.put("before", b"this server makes a bucket with its first object")
    uri, caches = s3_bucket.uri("ck"), [str(tmp_path / name) for name in ("a", "b")]
    exports = s3_bucket.uri("out")
    run = partial(train, nodes=True, server=s3_bucket.server, caches=caches, exports=exports, keep=2)
    assert on_ranks(2, run, uri) == [(0, 6, "")] * 2
    assert sorted(complete_checkpoints(uri)) == [4, 6]
    names = {"COMPLETE", "config.json", "run.json", "state.json", "backend/weight-0.json", "backend/weight-1.json"}
    assert set(s3_bucket.keys("ck")) == {f"ck/global_step_{step}/{name}" for step in (4, 6) for name in names}
    assert [key.rpartition("/")[2] for key in s3_bucket.keys("out/global_step_6")] == [
        "config.json",
        "model.safetensors",
    ]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    moved = [str(tmp_path / name) for name in ("c", "d")]
    again = partial(train, nodes=True, server=s3_bucket.server, caches=moved, resume_from="latest", num_steps=8)
    assert on_ranks(2, again, uri) == [(6, 8, "")] * 2


def test_a_node_that_cannot_upload_ends_all_and_all_go_on(s3_bucket, faulty, tmp_path):
    """The second node is denied its file; after that the upload is finished from what both have staged."""
    s3_bucket.put("before", b"this server makes a bucket with its first object")
    uri, caches = s3_bucket.uri("ck"), [str(tmp_path / name) for name in ("a", "b")]
    key = "ck/global_step_2/backend/weight-1.json"
    faulty.on("put", answer(403, "AccessDenied"), where=lambda request: request.key == key)
    for _, weight, error in on_ranks(2, partial(train, nodes=True, server=faulty.url, caches=caches), uri):
        assert f"{key}: access is denied (403 AccessDenied)" in error
        assert 2 <= weight <= 4
    assert complete_checkpoints(uri) == {}
    faulty.heal()
    assert (
        on_ranks(2, partial(train, nodes=True, server=faulty.url, caches=caches, resume_from="latest"), uri)
        == [(2, 6, "")] * 2
    )
    sent = {request.key for request in faulty.requests if request.kind == "put" and "step_2/" in request.key}
    assert sent == {f"ck/global_step_2/{name}" for name in ("PARTIAL", "COMPLETE", "backend/weight-1.json")}


def test_a_folder_that_a_node_does_not_share_is_named_before_the_first_step(tmp_path):
    for _, weight, error in on_ranks(2, train_apart, str(tmp_path)):
        assert "is there for rank 0, but not on" in error
        assert weight == 0


def train_apart(folder):
    """``train`` where each rank has a folder of its own behind the same path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "_TO_BE_SEEN", 0.5)
        patch.chdir(_made(Path(folder) / os.environ["RANK"]))
        return train("ckpt")


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def save_where_files_stay_small(model_dir, place):
    """A checkpoint of two ranks, then one in which rank 1 may not write as much: error, and what is there then."""
    with joined("cpu") as ranks:
        layout = Layout(data_rank=ranks.rank, data_size=2)
        settings = {"model_path": model_dir, "num_steps": 2}
        with closing(FsdpBackend(ranks=ranks, layout=layout, **settings)) as backend:
            checkpointer = Checkpointer(place, ranks=ranks, keep=1, run={}, config={})
            checkpointer.save(backend, step=1, state={})
            checkpointer.finish()
            if ranks.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            try:
                checkpointer.save(backend, step=2, state={})
                checkpointer.finish()
            except CheckpointError as error:
                return str(error)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_disk_that_takes_no_more_of_one_rank_keeps_the_old_checkpoint(tmp_path, model_dir):
    place = tmp_path / "ckpt"
    for error in on_ranks(2, save_where_files_stay_small, str(model_dir), str(place)):
        assert "global_step_2.partial/backend: could not be written" in error
        assert " GiB are free there)" in error
    assert [path.name for path in place.iterdir()] == ["global_step_1"]
    assert list(complete_checkpoints(place)) == [1]
