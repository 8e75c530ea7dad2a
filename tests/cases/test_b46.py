"""B46: only older whole checkpoints are removed, by their number, and only when the new one is whole.

That 0 is refused, tests/config/test_check.py holds.
"""

import pytest

from burnish.errors import CheckpointError
from burnish.train.cadence import Cadence
from burnish.train.callbacks import Callback
from burnish.train.checkpoint import complete_checkpoints
from tests.train.fakes import CountingBackend, make_trainer


class SavesAt(Callback):
    def __init__(self, *steps):
        self._steps = steps

    def on_step_end(self, progress, requests, *, batch, result):
        requests.save = progress.step in self._steps


class FullDisk(CountingBackend):
    """Has no room for the checkpoint of step 4."""

    def save(self, folder):
        if self.weight == 4:
            raise OSError(28, "No space left on device")
        return super().save(folder)


def steps_saved(tmp_path):
    return sorted(complete_checkpoints(tmp_path / "ckpt"))


def test_numbers_are_not_sorted_as_text(tmp_path):
    make_trainer(tmp_path, num_steps=100, callbacks=[SavesAt(9, 10)], keep=2)[0].train()
    assert steps_saved(tmp_path) == [10, 100]


def test_an_old_one_of_a_higher_number_removes_no_new_one(tmp_path):
    make_trainer(tmp_path, num_steps=40)[0].train()
    (tmp_path / "ckpt" / "global_step_40").rename(tmp_path / "ckpt" / "global_step_1000")
    make_trainer(tmp_path, num_steps=3, save_at=Cadence(1), keep=1)[0].train()
    assert steps_saved(tmp_path) == [3, 1000]


def test_a_save_that_fails_removes_nothing(tmp_path):
    trainer, _, _ = make_trainer(tmp_path, save_at=Cadence(2), keep=1, backend=FullDisk())
    with pytest.raises(CheckpointError, match=r"global_step_4\.partial: could not be written: .*No space"):
        trainer.train()
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["global_step_2"]


@pytest.mark.parametrize(("keep", "saved"), [(-1, [2, 4, 6, 8, 10]), (2, [8, 10]), (1, [10])])
def test_whatever_is_called_otherwise_is_left_alone(tmp_path, keep, saved):
    (tmp_path / "ckpt" / "global_step_final").mkdir(parents=True)
    (tmp_path / "ckpt" / "global_step_7").write_text("a file")
    (tmp_path / "ckpt" / "global_step_1").mkdir()
    (tmp_path / "ckpt" / "hf_exports" / "global_step_2").mkdir(parents=True)
    make_trainer(tmp_path, save_at=Cadence(2), keep=keep)[0].train()
    assert steps_saved(tmp_path) == saved
    names = {path.name for path in (tmp_path / "ckpt").iterdir()} - {f"global_step_{step}" for step in saved}
    assert names == {"global_step_final", "global_step_7", "global_step_1", "hf_exports"}
