"""A run is killed before each single change it makes to its checkpoints; the next start is never confused."""

import os
import shutil
import signal
import sys

from burnish.errors import CheckpointError
from burnish.train.cadence import Cadence
from burnish.train.checkpoint import complete_checkpoints
from tests.storage.faults import answer
from tests.train.fakes import CountingBackend, make_trainer

CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
KILLED = 9


def train_until(number: int, folder, **options) -> int:
    """Train in a process that is gone before its change ``number`` below ``folder``; its exit status."""
    if (child := os.fork()) == 0:
        left = number
        signal.alarm(60)

        def note(event, arguments):
            nonlocal left
            if event not in CHANGES or (event == "open" and not (arguments[1] or "").startswith(("w", "x", "a"))):
                return
            # Inside a folder that is removed, names are relative to it.
            if "global_step" in str(arguments[0]) or event in ("os.remove", "os.rmdir"):
                left -= 1
                if left == 0:
                    os._exit(KILLED)

        sys.addaudithook(note)
        make_trainer(folder, **options)[0].train()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def go_on(folder, *, num_steps, **options):
    """The step a new start goes on from; it saves once more."""
    trainer, backend, _ = make_trainer(folder, resume_from="latest", num_steps=num_steps + 2, **options)
    step = trainer.progress.step
    assert backend.weight == step, "never weights of one step with the place of another"
    trainer.train()
    return step


def test_before_any_change_to_a_folder(tmp_path):
    options = {"num_steps": 4, "save_at": Cadence(2), "keep": 1}
    steps = []
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        status = train_until(number, folder, **options)
        steps.append(go_on(folder, **options))
        assert [path.name for path in (folder / "ckpt").iterdir()] == ["global_step_6"]
        shutil.rmtree(folder)
        if status == 0:
            break
        assert status == KILLED
    assert steps == sorted(steps), "a later kill loses no more"
    assert set(steps) == {0, 2, 4}
    assert len(steps) > 20


def test_before_any_change_to_a_folder_that_has_this_step_already(tmp_path):
    """A fresh start writes step 2 anew: one of both is whole at any time."""
    make_trainer(tmp_path / "before", num_steps=2)[0].train()
    weights = []
    for number in range(1, 1000):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        status = train_until(number, folder, num_steps=2, backend=CountingBackend(bad_steps=(1,)))
        trainer, backend, _ = make_trainer(folder, resume_from="latest", num_steps=2)
        assert trainer.progress.step == 2
        weights.append(backend.weight)
        shutil.rmtree(folder)
        if status == 0:
            break
    assert weights == sorted(weights, reverse=True)
    assert set(weights) == {1, 2}


def test_before_any_change_to_a_bucket(s3_bucket, faulty, tmp_path, monkeypatch):
    """From one request on, none that changes the bucket gets through: for the bucket, that is a kill."""
    s3_bucket.put("before", b"this server makes a bucket with its first object")
    options = {"num_steps": 4, "save_at": Cadence(2), "keep": 1}
    steps = []
    for number in range(1000):
        uri = s3_bucket.uri(f"ck{number}")
        monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / f"cache{number}"))
        left = number

        def is_lost(request, prefix=f"ck{number}/"):
            nonlocal left
            if request.key.startswith(prefix):
                left -= 1
            return left < 0

        for kind in ("put", "delete"):
            faulty.on(kind, answer(403, "AccessDenied"), where=is_lost)
        ended = True
        try:
            make_trainer(ckpt_path=uri, **options)[0].train()
        except CheckpointError:
            ended = False
        faulty.heal()
        monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / f"other{number}"))
        steps.append(go_on(None, ckpt_path=uri, **options))
        assert list(complete_checkpoints(uri)) == [6]
        assert {key.split("/")[1] for key in s3_bucket.keys(f"ck{number}/")} == {"global_step_6"}, (
            "nothing is left over"
        )
        if ended:
            break
    assert steps == sorted(steps)
    assert set(steps) == {0, 2, 4}
    assert len(steps) > 12
