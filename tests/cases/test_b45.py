"""B45: a checkpoint that is not whole is passed over by name, or refused; never is half of one taken."""

import shutil

import pytest

from burnish.errors import CheckpointError
from burnish.train.cadence import Cadence
from tests.train.fakes import make_trainer


@pytest.fixture
def folder(tmp_path):
    """``global_step_4`` and ``global_step_8`` are complete."""
    make_trainer(tmp_path, num_steps=8, save_at=Cadence(4))[0].train()
    return tmp_path / "ckpt"


def resumed(tmp_path):
    """(step, weight, the rows that come next) of a run that goes on from the latest."""
    trainer, backend, _ = make_trainer(tmp_path, resume_from="latest", num_steps=9)
    step = trainer.progress.step
    trainer.train()
    return step, backend.rows


def rows_from(step):
    trainer, backend, _ = make_trainer(num_steps=9)
    trainer.train()
    return backend.rows[step:]


@pytest.mark.parametrize("lacks", ["everything", "state.json", "backend/weight.json"])
def test_one_that_was_not_written_to_its_end_is_passed_over_by_name(tmp_path, folder, caplog, lacks):
    """It was killed before ``COMPLETE``, which is written last."""
    (folder / "global_step_8" / "COMPLETE").unlink()
    if lacks == "everything":
        shutil.rmtree(folder / "global_step_8")
        (folder / "global_step_8").mkdir()
    else:
        (folder / "global_step_8" / lacks).unlink()
    (folder / "global_step_12.partial").mkdir()
    assert resumed(tmp_path) == (4, rows_from(4))
    assert f"{folder}: not complete, passed over: global_step_12.partial, global_step_8" in caplog.text


@pytest.mark.parametrize("name", ["state.json", "run.json", "config.json", "backend/weight.json"])
@pytest.mark.parametrize("how", ["empty", "missing"])
def test_a_complete_one_that_lost_a_file_is_refused_by_name(tmp_path, folder, name, how):
    """As after a fault of the disk: it counted, so passing over it would silently repeat its steps."""
    file = folder / "global_step_8" / name
    file.write_text("") if how == "empty" else file.unlink()
    problem = {"empty": "is not as it was written", "missing": "is missing"}[how]
    with pytest.raises(
        CheckpointError, match=rf"global_step_8/{name}: {problem}\n  fix: resume from an older checkpoint"
    ):
        resumed(tmp_path)


@pytest.mark.parametrize("content", ["", "8", "{", "\0" * 20, "[]", "{}"])
def test_a_complete_file_that_says_nothing_is_refused_by_name(tmp_path, folder, content):
    (folder / "global_step_8" / "COMPLETE").write_text(content)
    with pytest.raises(CheckpointError, match="global_step_8/COMPLETE: is not as it was written"):
        resumed(tmp_path)


@pytest.mark.parametrize("pointer", ["global_step_16", "", "/moved/global_step_4"])
def test_no_pointer_is_believed(tmp_path, folder, pointer):
    """Which one is the latest, the folders themselves say; they may be moved."""
    (folder / "latest_checkpointed_iteration.txt").write_text(pointer)
    moved = tmp_path / "moved"
    moved.mkdir()
    folder.rename(moved / "ckpt")
    assert resumed(moved) == (8, rows_from(8))


def test_none_complete_starts_fresh_and_names_the_incomplete(tmp_path, caplog):
    (tmp_path / "ckpt" / "global_step_8").mkdir(parents=True)
    assert resumed(tmp_path) == (0, rows_from(0))
    assert "ckpt: not complete, passed over: global_step_8" in caplog.text
    assert "ckpt: no complete checkpoint; starting fresh" in caplog.text


def test_nothing_at_all_starts_fresh_and_says_so(tmp_path, caplog):
    assert resumed(tmp_path) == (0, rows_from(0))
    assert "ckpt: no complete checkpoint; starting fresh" in caplog.text


def test_a_path_must_be_complete(folder):
    (folder / "global_step_8" / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match=r"global_step_8: has no COMPLETE file"):
        make_trainer(resume_from=str(folder / "global_step_8"))
    with pytest.raises(CheckpointError, match=r"global_step_5: no such checkpoint"):
        make_trainer(resume_from=str(folder / "global_step_5"))
