"""Checkpoints that lie in a bucket alone: what counts, what a kill or a failing request leaves, what is fetched."""

import json
import os
from pathlib import Path

import pytest

from burnish.errors import BurnishError, CheckpointError
from burnish.train.cadence import Cadence
from burnish.train.checkpoint import complete_checkpoints
from tests.storage.faults import answer
from tests.train.fakes import CountingBackend, make_trainer

FILES = ["COMPLETE", "backend/weight.json", "config.json", "run.json", "state.json"]


def names(bucket, step: int) -> list[str]:
    return [key.removeprefix(f"ck/global_step_{step}/") for key in bucket.keys(f"ck/global_step_{step}")]


def staged() -> list[Path]:
    return [path for path in (Path(os.environ["BURNISH_CACHE"]) / "checkpoints").rglob("*") if path.is_file()]


def changes(proxy) -> list[str]:
    """What was written and removed, in order."""
    return [f"{r.kind} {r.key.removeprefix('ck/')}" for r in proxy.requests if r.kind in ("put", "delete")]


def on_another_machine(monkeypatch, tmp_path, name="other"):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / name))


@pytest.fixture
def uri(s3_bucket) -> str:
    s3_bucket.put("before", b"this server makes a bucket with its first object")
    return s3_bucket.uri("ck")


@pytest.mark.parametrize(("keep", "saved"), [(-1, [2, 4, 6, 8, 10]), (2, [8, 10]), (1, [10])])
def test_saved_kept_and_continued_on_another_machine(s3_bucket, uri, tmp_path, monkeypatch, keep, saved):
    s3_bucket.put("ck/global_step_final/mine", b"1")
    s3_bucket.put("ck/hf_exports/global_step_2/COMPLETE", b"1")
    s3_bucket.put("ck/global_step_1/of-another-program", b"1")
    make_trainer(ckpt_path=uri, save_at=Cadence(2), keep=keep)[0].train()
    assert sorted(complete_checkpoints(uri)) == saved
    assert names(s3_bucket, 10) == FILES
    others = {key.split("/")[1] for key in s3_bucket.keys("ck")} - {f"global_step_{step}" for step in saved}
    assert others == {"global_step_final", "hf_exports", "global_step_1"}
    assert staged() == []

    on_another_machine(monkeypatch, tmp_path)
    whole, unbroken, _ = make_trainer(num_steps=13)
    whole.train()
    trainer, backend, _ = make_trainer(ckpt_path=uri, resume_from="latest", num_steps=13)
    trainer.train()
    assert (backend.rows, backend.weight) == (unbroken.rows[10:], 13)
    assert staged() == [], "what was fetched goes with the first save"


def test_complete_comes_last_and_goes_first(s3_bucket, uri, faulty):
    make_trainer(ckpt_path=uri, num_steps=4, save_at=Cadence(2), keep=1)[0].train()
    done = changes(faulty)
    second = done.index("put global_step_4/PARTIAL")
    assert done[0] == "put global_step_2/PARTIAL"
    assert sorted(done[2 : second - 2]) == [f"put global_step_2/{name}" for name in FILES[1:]]
    assert done[second - 2 : second] == ["put global_step_2/COMPLETE", "delete global_step_2/PARTIAL"]
    removal = done[done.index("put global_step_4/COMPLETE") :]
    assert removal[1:4] == [
        "delete global_step_4/PARTIAL",
        "put global_step_2/PARTIAL",
        "delete global_step_2/COMPLETE",
    ]
    assert sorted(removal[4:-1]) == [f"delete global_step_2/{name}" for name in FILES[1:]]
    assert removal[-1] == "delete global_step_2/PARTIAL"


def test_a_step_saved_again_does_not_count_until_it_is_whole(s3_bucket, uri, faulty):
    make_trainer(ckpt_path=uri, num_steps=2)[0].train()
    s3_bucket.put("ck/global_step_2/backend/of-more-ranks", b"old")
    faulty.heal()
    make_trainer(ckpt_path=uri, num_steps=2, backend=CountingBackend(bad_steps=(1,)))[0].train()
    assert changes(faulty)[:2] == ["put global_step_2/PARTIAL", "delete global_step_2/COMPLETE"]
    assert names(s3_bucket, 2) == FILES
    assert json.loads(s3_bucket.get("ck/global_step_2/backend/weight.json")) == 1


@pytest.mark.parametrize("failing", ["state.json", "backend/weight.json", "PARTIAL", "COMPLETE"])
def test_an_upload_that_fails_ends_the_run_and_goes_on_at_the_next_start(
    s3_bucket, uri, faulty, impatient, tmp_path, monkeypatch, failing
):
    make_trainer(ckpt_path=uri, num_steps=2)[0].train()
    faulty.heal()
    faulty.on("put", answer(503, "SlowDown"), where=lambda request: request.key == f"ck/global_step_4/{failing}")
    trainer, _, _ = make_trainer(ckpt_path=uri, resume_from="latest", num_steps=6, save_at=Cadence(4))
    with pytest.raises(CheckpointError, match=rf"ck/global_step_4/{failing}: cannot be written \(503 SlowDown\)"):
        trainer.train()
    assert sorted(complete_checkpoints(uri)) == [2]
    sent = {request.key for request in faulty.requests if request.kind == "put"}
    faulty.heal()

    own = os.environ["BURNISH_CACHE"]
    on_another_machine(monkeypatch, tmp_path)
    assert make_trainer(ckpt_path=uri, resume_from="latest")[0].progress.step == 2
    monkeypatch.setenv("BURNISH_CACHE", own)
    assert make_trainer(ckpt_path=uri)[0].progress.step == 0
    assert sorted(complete_checkpoints(uri)) == [2], "a fresh start wants none of it"
    trainer, backend, _ = make_trainer(ckpt_path=uri, resume_from="latest")
    assert trainer.progress.step == backend.weight == 4
    assert names(s3_bucket, 4) == FILES
    again = {request.key for request in faulty.requests if request.kind == "put"}
    assert sent & again <= {f"ck/global_step_4/{name}" for name in ("PARTIAL", failing)}, "only what is missing"


@pytest.mark.parametrize("failing", ["COMPLETE", "state.json", "PARTIAL"])
def test_a_removal_that_fails_leaves_nothing_that_counts_and_is_finished_later(s3_bucket, uri, faulty, failing):
    place = f"ck/global_step_2/{failing}"
    faulty.on(
        "delete", answer(403, "AccessDenied"), where=lambda request: request.key == place, skip=failing != "state.json"
    )
    trainer, _, _ = make_trainer(ckpt_path=uri, num_steps=4, save_at=Cadence(2), keep=1)
    with pytest.raises(
        CheckpointError, match=rf"{place}: access is denied \(403 AccessDenied\)\n.*delete from the buc"
    ):
        trainer.train()
    assert sorted(complete_checkpoints(uri)) == ([2, 4] if failing == "COMPLETE" else [4])
    faulty.heal()
    make_trainer(ckpt_path=uri, resume_from="latest", num_steps=5, keep=1)[0].train()
    assert {key.split("/")[1] for key in s3_bucket.keys("ck")} == {"global_step_5"}


def test_what_may_pass_is_tried_again(uri, faulty, impatient):
    faulty.on("put", answer(503, "SlowDown"), times=2)
    faulty.on("delete", answer(500, "InternalError"), times=2)
    make_trainer(ckpt_path=uri, num_steps=4, save_at=Cadence(2), keep=1)[0].train()
    assert sorted(complete_checkpoints(uri)) == [4]


def test_latest_passes_over_incomplete_ones_by_name(s3_bucket, uri, caplog):
    make_trainer(ckpt_path=uri, num_steps=8, save_at=Cadence(4))[0].train()
    s3_bucket.delete("ck/global_step_8/COMPLETE")
    trainer, _, _ = make_trainer(ckpt_path=uri, resume_from="latest")
    assert trainer.progress.step == 4
    assert f"{uri}: not complete, passed over: global_step_8" in caplog.text
    with pytest.raises(CheckpointError, match=r"ck/global_step_8: has no COMPLETE file"):
        make_trainer(resume_from=f"{uri}/global_step_8")
    with pytest.raises(CheckpointError, match=r"ck/global_step_9: has no COMPLETE file"):
        make_trainer(resume_from=f"{uri}/global_step_9")


@pytest.mark.parametrize("change", ["replaced", "removed", "in the cache"])
def test_a_file_that_is_not_as_it_was_written_is_found_before_anything_is_read(s3_bucket, uri, change):
    make_trainer(ckpt_path=uri, num_steps=2)[0].train()
    where = f"{uri}/global_step_2"
    if change == "replaced":
        s3_bucket.put("ck/global_step_2/backend/weight.json", b"7")
    elif change == "removed":
        s3_bucket.delete("ck/global_step_2/backend/weight.json")
    else:
        make_trainer(resume_from=where)
        (file,) = [path for path in staged() if path.name == "weight.json"]
        file.write_text("7")
    with pytest.raises(BurnishError, match=r"weight\.json: (differs from the checksum|is missing|is not as it was)"):
        make_trainer(ckpt_path=uri, resume_from=where)


def test_a_staging_disk_without_room_is_named_before_anything_is_written(uri):
    class Huge(CountingBackend):
        save_bytes = 1 << 60

    trainer, _, _ = make_trainer(ckpt_path=uri, num_steps=2, backend=Huge())
    with pytest.raises(
        BurnishError, match=r"is full \(1073741824\.00 GiB are needed, .* are free\)\n  fix: .*cache_dir"
    ):
        trainer.train()
    assert staged() == []
