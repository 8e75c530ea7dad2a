"""Services that keep metrics: what they hold after a run that was resumed, and that none of them stops one."""

import json
from pathlib import Path

import pytest

from burnish.config.choices import TrackerName
from burnish.train.services import Guarded, RunFacts, open_service

LOSSES = {step: 1 / step for step in range(1, 7)}


def facts(folder, *, resumed=False):
    config = {"model.path": "m", "batch_size": 8}
    return RunFacts(folder, "project", "name", "0123456789abcdef", ["one", "two"], config, resumed)


def run_and_resume(name, folder):
    """Steps 1 to 4 of a run that dies, then 3 to 6 of the one that goes on from step 2."""
    for steps, after in ((range(1, 5), 0), (range(3, 7), 4)):
        tracker = open_service(TrackerName(name), facts(folder, resumed=after > 0), after=after)
        for step in steps:
            tracker.log({"train/loss": LOSSES[step], "train/mfu": None, "train/grad_norm": float("nan")}, step=step)
        tracker.close()


def test_tensorboard_has_each_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_and_resume("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert {s.step: pytest.approx(s.value) for s in events.Scalars("train/loss")} == LOSSES
    assert len(events.Scalars("train/loss")) == 6


class Broken:
    def __init__(self, *, at):
        self.at = at
        self.steps = []

    def log(self, metrics, *, step):
        if step == self.at:
            raise ConnectionError("no route to host")
        self.steps.append(step)

    def close(self):
        raise OSError("disk full")


def test_an_error_of_a_service_is_said_once_and_ends_nothing(caplog):
    broken = Broken(at=3)
    tracker = Guarded("wandb", lambda: broken, after=1)
    for step in range(1, 6):
        tracker.log({"train/loss": 1.0}, step=step)
    tracker.close()
    assert broken.steps == [2]
    assert [r.message for r in caplog.records] == [
        "wandb is left alone from here on (ConnectionError: no route to host)"
    ]


def test_a_service_that_cannot_begin_is_left_alone(caplog):
    tracker = Guarded("mlflow", lambda: open(Path("/nowhere/at/all")), after=0)  # noqa: SIM115, PTH123
    tracker.log({"train/loss": 1.0}, step=1)
    tracker.close()
    assert len(caplog.records) == 1
    assert json.dumps(caplog.records[0].message).startswith('"mlflow is left alone from here on (FileNotFoundError')
