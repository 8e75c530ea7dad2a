"""Services that keep metrics: what they hold after a run that was resumed, and that none of them stops one."""

import json
import threading
import time
from pathlib import Path

import pytest

from burnish.config import SFTConfig
from burnish.config.choices import TrackerName
from burnish.train import services
from burnish.train.services import Guarded, RunFacts, open_service
from burnish.train.trackers import Trackers
from tests.train.kept import of_mlflow, of_tensorboard, of_trackio, of_wandb

LOSSES = {step: 1 / step for step in range(1, 7)}
ANSWERS = [("say <b>hi</b>\nplease", "hi *there*"), ("", "ß")]
ODD = "train/loss/a@b..//../[x]"
SECRET = "hunter2"


pytestmark = pytest.mark.usefixtures("services_here")


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch):
    """No test fails because one is."""
    monkeypatch.setattr(services, "CLOSE_SECONDS", 600.0)


@pytest.fixture
def _no_wandb_left():
    """Its process ends with the test."""
    yield
    import wandb

    wandb.teardown()


def facts(folder, *, start=0, known=-1):
    data = [f"s3://user:{SECRET}@bucket/{'x' * 7000}"]
    config = SFTConfig(model={"path": "m"}, train_datasets=data, tags=["one", "two (2)"])
    return RunFacts(
        folder=folder,
        project=f"project of {folder.name}",
        name="name",
        identity="0123456789abcdef",
        tags=config.tags,
        config=config.to_public(),
        start=start,
        known=known,
    )


def log_steps(tracker, steps):
    for step in steps:
        if step == 4:
            tracker.log_answers(ANSWERS, step=step)
        values = {"train/loss": LOSSES[step] if step else 9.0, ODD: 1.0}
        tracker.log(values | {"train/mfu": None, "train/grad_norm": float("nan"), "x": float("inf")}, step=step)


def run_and_resume(name, folder):
    """Steps 1 to 4 of a run that fails, then 3 to 6 of the one that goes on from step 2; an evaluation before all."""
    for steps, start, known in ((range(5), 0, -1), (range(3, 7), 2, 4)):
        tracker = open_service(TrackerName(name), facts(folder, start=start, known=known))
        log_steps(tracker, steps)
        tracker.close(failed=not start)


def warnings_of(caplog):
    """Ours; the libraries that read back have their own."""
    return [record.message for record in caplog.records if record.name.startswith("burnish")]


def each_once():
    return [(0, 9.0), *((step, pytest.approx(loss)) for step, loss in LOSSES.items())]


def test_tensorboard_has_each_step_once(tmp_path, caplog):
    run_and_resume("tensorboard", tmp_path)
    kept = of_tensorboard(tmp_path)
    assert warnings_of(caplog) == []
    assert kept["losses"] == each_once()
    assert len(kept["metrics"]) == 2
    assert "    model.path: m\n" in kept["texts"]["config", 0]
    assert kept["texts"]["tags", 0] == "one, two (2)"
    assert SECRET not in str(kept)
    assert kept["texts"]["answers/1", 4] == ("prompt\n\n    say <b>hi</b>\n    please\n\nanswer\n\n    hi *there*")
    assert kept["texts"]["answers/2", 4].endswith("answer\n\n    ß")


@pytest.mark.usefixtures("_no_wandb_left")
def test_wandb_has_each_step_once_under_one_id(tmp_path, caplog):
    import wandb

    run_and_resume("wandb", tmp_path)
    wandb.teardown()  # its process has written all once it ended
    kept = of_wandb(tmp_path)
    assert warnings_of(caplog) == []
    assert kept["losses"] == each_once()
    assert set(kept["ids"]) == {"0123456789abcdef"}
    assert kept["exits"] == [1, 0]
    assert {key for key in kept["metrics"] if not key.startswith("answers/")} == {"train/loss", ODD}
    assert kept["tags"] == {"one", "two (2)"}
    assert kept["config"]["model.path"] == "m"
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/answers*.json")
    assert json.loads(table.read_text()) == {"columns": ["prompt", "answer"], "data": [list(a) for a in ANSWERS]}
    files = [file for file in (tmp_path / "wandb").rglob("*") if file.is_file()]
    assert not [file for file in files if SECRET.encode() in file.read_bytes()]


def test_mlflow_has_each_step_once_in_one_run(tmp_path, mlflow_server, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    run_and_resume("mlflow", tmp_path)
    kept = of_mlflow(mlflow_server, project=f"project of {tmp_path.name}")
    assert warnings_of(caplog) == []
    assert kept["losses"] == each_once()
    assert kept["metrics"] == {"train/loss", "train/loss/a_40_b../_2e__2e_/_5b_x_5d_"}
    assert (kept["name"], kept["status"]) == ("name", "FINISHED")
    assert (kept["tags"]["one"], kept["tags"]["two _28_2_29_"]) == ("true", "true")
    config = facts(tmp_path).config
    assert len(config) > 100, "more than it takes at once"
    assert kept["params"] == {key: str(value)[:6000] for key, value in config.items()}
    assert len(kept["params"]["train_datasets"]) == 6000
    assert SECRET not in str(kept)
    assert kept["answers"] == {
        "answers/step_4.json": [{"prompt": prompt, "answer": answer} for prompt, answer in ANSWERS]
    }


def test_mlflow_goes_on_where_the_service_ends_not_the_file(tmp_path, mlflow_server, monkeypatch):
    """A killed run may have written a step that the service never got."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    for steps, start, known in ((range(1, 4), 0, -1), (range(3, 6), 2, 5)):
        tracker = open_service(TrackerName.MLFLOW, facts(tmp_path, start=start, known=known))
        log_steps(tracker, steps)
        tracker.close(failed=start > 0)
    kept = of_mlflow(mlflow_server, project=f"project of {tmp_path.name}")
    assert [step for step, _ in kept["losses"]] == [1, 2, 3, 4, 5]
    assert kept["status"] == "FAILED"


def test_trackio_has_each_step_once(tmp_path, caplog, capsys):
    run_and_resume("trackio", tmp_path)
    kept = of_trackio(f"project of {tmp_path.name}")
    assert warnings_of(caplog) == []
    assert capsys.readouterr().out == ""
    assert kept["losses"] == each_once()
    assert kept["metrics"] == {"train/loss", ODD, "answers"}
    assert kept["config"]["tags"] == ["one", "two (2)"]
    assert SECRET not in str(kept["config"])
    assert kept["answers"] == {4: [{"prompt": prompt, "answer": answer} for prompt, answer in ANSWERS]}


class Broken:
    def __init__(self, *, at, last_step=-1, wait=None):
        self.at = at
        self.last_step = last_step
        self.steps = []
        self.wait = wait

    def log(self, metrics, *, step):
        if step == self.at:
            if self.wait:
                self.wait.wait()
            raise ConnectionError("no route to http://user:hunter2@host")
        self.steps.append(step)

    def log_answers(self, answers, *, step):
        self.log({}, step=step)

    def close(self, *, failed):
        raise OSError("disk full")


@pytest.mark.parametrize("at", [3, 9])
def test_an_error_of_a_service_is_said_once_and_ends_nothing(caplog, at):
    broken = Broken(at=at, last_step=1)
    tracker = Guarded("wandb", lambda: broken, close_seconds=60)
    for step in range(1, 6):
        tracker.log({"train/loss": 1.0}, step=step)
    tracker.close(failed=False)
    tracker.close(failed=False)
    assert broken.steps == ([2] if at == 3 else [2, 3, 4, 5])
    why = "ConnectionError: no route to http://***@host" if at == 3 else "OSError: disk full"
    assert [r.message for r in caplog.records] == [f"wandb is left alone from here on ({why})"]


def test_a_service_that_cannot_begin_is_left_alone(caplog):
    tracker = Guarded("mlflow", lambda: open(Path("/nowhere/at/all")), close_seconds=60)  # noqa: SIM115, PTH123
    tracker.log({"train/loss": 1.0}, step=1)
    tracker.close(failed=False)
    (record,) = caplog.records
    assert record.message.startswith("mlflow is left alone from here on (FileNotFoundError")


def test_services_that_hang_hold_up_nothing_and_end_together(caplog):
    release = threading.Event()
    hung = [Guarded(name, lambda: Broken(at=1, wait=release), close_seconds=0.5) for name in ("a", "b", "c")]
    trackers = Trackers(hung, identity="")
    started = time.monotonic()
    for step in range(1, 4):
        trackers.log({"train/loss": 1.0}, step=step)
    trackers.log_answers(ANSWERS, step=3)
    logged = time.monotonic() - started
    trackers.close(failed=False)
    assert sorted(r.message for r in caplog.records) == [
        f"{name} is left alone from here on (it did not take the last metrics within 0.5 seconds)" for name in "abc"
    ]
    assert logged < 0.5, "the first step hangs"
    release.set()
    for tracker in hung:
        tracker._thread.join()
    assert len(caplog.records) == 3


def test_a_service_too_far_behind_is_left_alone(caplog, monkeypatch):
    monkeypatch.setattr(services, "_MOST_WAITING", 3)
    release = threading.Event()
    service = Broken(at=1, wait=release)
    tracker = Guarded("trackio", lambda: service, close_seconds=0.5)
    for step in range(1, 8):
        tracker.log({}, step=step)
    release.set()
    tracker.close(failed=False)
    tracker._thread.join()
    assert [r.message for r in caplog.records] == ["trackio is left alone from here on (it is 3 steps behind)"]
    assert service.steps == []


def test_an_unreachable_mlflow_takes_no_longer_than_it_may(tmp_path, caplog, monkeypatch):
    import socket

    monkeypatch.setattr(services, "CLOSE_SECONDS", 0.5)
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        tracker = open_service(TrackerName.MLFLOW, facts(tmp_path))
        tracker.log({"train/loss": 1.0}, step=1)
        tracker.close(failed=False)
    tracker._thread.join()
    assert [r.message.partition(" (")[0] for r in caplog.records] == ["mlflow is left alone from here on"]


@pytest.mark.usefixtures("_no_wandb_left")
def test_wandb_without_a_key_asks_nobody(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    tracker = open_service(TrackerName.WANDB, facts(tmp_path))
    tracker.close(failed=False)
    (record,) = caplog.records
    assert "no API key: `wandb login`" in record.message
