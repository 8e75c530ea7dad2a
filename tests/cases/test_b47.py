"""B47: the last step is saved once, and a finished run is not trained again."""

import pytest

from burnish.backends.comm import alone
from burnish.train.cadence import Cadence
from burnish.train.checkpoint import complete_checkpoints
from burnish.train.export import Exporter
from tests.train.fakes import make_trainer


@pytest.mark.parametrize(("interval", "saved"), [(5, [5, 10]), (4, [4, 8, 10]), (0, [10]), (10, [10])])
def test_checkpoints_of_ten_steps(tmp_path, interval, saved):
    trainer, backend, _ = make_trainer(tmp_path, save_at=Cadence(interval))
    saves = []
    save = backend.save
    backend.save = lambda folder: saves.append(folder.parent.name) or save(folder)
    trainer.train()
    assert sorted(complete_checkpoints(tmp_path / "ckpt")) == saved
    assert saves == [f"global_step_{step}.partial" for step in saved], "each once"


def test_a_finished_run_resumed_does_nothing(tmp_path):
    make_trainer(tmp_path)[0].train()
    written = (tmp_path / "ckpt" / "global_step_10" / "COMPLETE").stat().st_mtime_ns
    exporter = Exporter(str(tmp_path), Cadence(5), alone())
    trainer, backend, recorder = make_trainer(
        tmp_path, resume_from="latest", eval_at=Cadence(3), eval_first=True, exporter=exporter
    )
    assert trainer.train().step == 10
    assert (backend.rows, backend.weight, backend.exports, recorder.lines) == ([], 10, [], [])
    assert (tmp_path / "ckpt" / "global_step_10" / "COMPLETE").stat().st_mtime_ns == written


def test_more_steps_continue_the_same_rows(tmp_path):
    whole, unbroken, _ = make_trainer(num_steps=13)
    whole.train()
    make_trainer(tmp_path)[0].train()
    trainer, backend, _ = make_trainer(tmp_path, resume_from="latest", num_steps=13)
    trainer.train()
    assert backend.rows == unbroken.rows[10:]
