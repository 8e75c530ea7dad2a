"""B72: callbacks at the edges."""

import pytest

from burnish.train.callbacks import Callback
from tests.train.fakes import make_trainer


class Notes(Callback):
    def __init__(self, *, stop_at=None):
        self.events = []
        self._stop_at = stop_at

    def on_train_begin(self, progress, requests):
        self.events.append("train begin")

    def on_epoch_begin(self, progress, requests):
        self.events.append(f"epoch {progress.epoch} begin")

    def on_step_begin(self, progress, requests):
        self.events.append(f"step {progress.step + 1} begin")

    def on_step_end(self, progress, requests, *, batch, result):
        self.events.append(f"step {progress.step} end")
        requests.stop = progress.step == self._stop_at

    def on_epoch_end(self, progress, requests):
        self.events.append(f"epoch {progress.epoch - 1} end")

    def on_train_end(self, progress, requests):
        self.events.append("train end")

    def on_save(self, progress, requests, *, folder):
        self.events.append(f"save {folder.rpartition('/')[2]}")


def step(number):
    return [f"step {number} begin", f"step {number} end"]


def events(tmp_path, *, notes=None, **options):
    notes = notes or Notes()
    make_trainer(tmp_path, rows=3, batch_size=2, callbacks=[notes], **({"num_steps": 4} | options))[0].train()
    return notes.events


def test_two_epochs_of_three_rows(tmp_path):
    assert events(tmp_path) == [
        "train begin",
        *["epoch 0 begin", *step(1), *step(2), "epoch 0 end"],
        *["epoch 1 begin", *step(3), *step(4), "epoch 1 end", "save global_step_4"],
        "train end",
    ]


def test_a_stop_in_step_one_saves_and_ends(tmp_path):
    expected = ["train begin", "epoch 0 begin", *step(1), "save global_step_1", "train end"]
    assert events(tmp_path, notes=Notes(stop_at=1)) == expected


def test_steps_that_end_inside_an_epoch_end_no_epoch(tmp_path):
    assert events(tmp_path, num_steps=3)[-5:] == ["epoch 1 begin", *step(3), "save global_step_3", "train end"]


@pytest.mark.parametrize(("stopped", "epoch"), [(2, 1), (3, 1)])
def test_the_epoch_after_a_resume_is_steps_done_by_steps_an_epoch(tmp_path, stopped, epoch):
    events(tmp_path, num_steps=stopped)
    resumed = events(tmp_path, resume_from="latest")
    assert resumed[:3] == ["train begin", f"epoch {epoch} begin", f"step {stopped + 1} begin"]
    assert resumed.count(f"epoch {epoch} end") == 1


def test_an_exception_in_a_callback_is_not_swallowed(tmp_path):
    class Breaks(Callback):
        def on_step_end(self, progress, requests, *, batch, result):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        make_trainer(tmp_path, callbacks=[Breaks()])[0].train()
