"""Metrics to services that keep them: TensorBoard, Weights & Biases, MLflow, Trackio. Each is an extra of its own.

Its rule: a run never ends, waits or fails for a service: each has a thread of its own, and one that fails or hangs is
left alone from then on, with one warning.
"""

import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, Protocol, TypeAlias

from burnish.config.choices import TrackerName
from burnish.errors import without_secrets
from burnish.log import get_logger
from burnish.train.trackers import Metrics, Tracker

log = get_logger(__name__)

CLOSE_SECONDS = 60.0
"""The end of a run waits no longer than this for a service."""
_MOST_WAITING = 10_000
"""Steps that a service may be behind."""
_MLFLOW_METRICS, _MLFLOW_PARAMS = 999, 100
"""As many as it takes at once."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a service is told of a run."""

    folder: Path
    """Where services that write files write them."""
    project: str
    name: str
    identity: str
    """The same when the run is resumed, and no other run's."""
    tags: Sequence[str]
    config: Mapping[str, Any]
    """Every key, without credentials."""
    start: int
    """The step that the run goes on from; 0 for a fresh one."""
    known: int
    """The last step that was logged before; -1 where none was."""


class Service(Tracker, Protocol):
    """A tracker that knows what it has."""

    last_step: int
    """The last step that it holds already; -1 where it has none."""


_Action: TypeAlias = Callable[[Service], None]


class Guarded:
    """A service in a thread. What ``make`` or the service raises is a warning; steps it has are not sent again."""

    def __init__(self, name: str, make: Callable[[], Service], *, close_seconds: float) -> None:
        self._name, self._close_seconds = name, close_seconds
        self._waiting: Queue[tuple[float, _Action]] = Queue(_MOST_WAITING)
        self._left_alone = Event()
        self._thread = Thread(target=self._work, args=(make,), name=f"burnish {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Send the numbers that are finite."""
        numbers = {key: value for key, value in metrics.items() if _is_number(value)}
        self._put(step, lambda service: service.log(numbers, step=step))

    def log_answers(self, answers: Sequence[tuple[str, str]], *, step: int) -> None:
        """Send them."""
        self._put(step, lambda service: service.log_answers(answers, step=step))

    def close(self, *, failed: bool) -> None:
        """Wait until all is sent, but not for ever."""
        self._put(math.inf, lambda service: service.close(failed=failed))
        if not self._left_alone.is_set():
            self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            self._leave_alone(f"it did not take the last metrics within {self._close_seconds:g} seconds")

    def _put(self, step: float, action: _Action) -> None:
        if self._left_alone.is_set():
            return
        try:
            self._waiting.put_nowait((step, action))
        except Full:
            self._leave_alone(f"it is {_MOST_WAITING} steps behind")

    def _work(self, make: Callable[[], Service]) -> None:
        try:
            service, step = make(), 0.0
            while step < math.inf and not self._left_alone.is_set():
                step, action = self._waiting.get()
                if step > service.last_step:
                    action(service)
        except BaseException as error:  # noqa: BLE001 - of whatever kind, an exit too, training goes on
            self._leave_alone(f"{type(error).__name__}: {without_secrets(str(error))}")

    def _leave_alone(self, why: str) -> None:
        if not self._left_alone.is_set():
            self._left_alone.set()
            log.warning("%s is left alone from here on (%s)", self._name, why)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class TensorBoardService:
    """Event files in ``{folder}/tensorboard/``, a folder a run. What a resumed run does again replaces what was there."""

    def __init__(self, facts: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.last_step = facts.start or -1
        folder = facts.folder / "tensorboard" / facts.identity[:8]
        purge = facts.start + 1 if facts.start else None
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)
        if not facts.start:
            lines = [f"    {key}: {value}" for key, value in facts.config.items()]
            self._writer.add_text("config", "\n".join(lines), 0)
            self._writer.add_text("tags", ", ".join(facts.tags), 0)

    def log(self, metrics: Metrics, *, step: int) -> None:
        """One scalar each."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def log_answers(self, answers: Sequence[tuple[str, str]], *, step: int) -> None:
        """A text each, as a block, so that no sign of it is taken for Markdown."""
        for number, pair in enumerate(answers, start=1):
            prompt, answer = ("\n".join(f"    {line}" for line in text.splitlines()) for text in pair)
            self._writer.add_text(f"answers/{number}", f"prompt\n\n{prompt}\n\nanswer\n\n{answer}", step)

    def close(self, *, failed: bool) -> None:
        """Write what is held."""
        del failed
        self._writer.close()


class WandbService:
    """A run of Weights & Biases; its own environment (``WANDB_MODE``, ``WANDB_API_KEY``) decides where to.

    The command line, the printed lines and changes of code are not sent: they may hold credentials.
    """

    def __init__(self, facts: RunFacts) -> None:
        import wandb

        if wandb.setup().settings.mode in ("online", "run") and not wandb.login(prompt=False, verify=False):
            raise PermissionError("no API key: `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline")
        self._run: Any = wandb.init(
            project=facts.project,
            name=facts.name,
            id=facts.identity,
            resume="allow",
            tags=list(dict.fromkeys(tag[:64] for tag in facts.tags if tag)),
            config=dict(facts.config),
            allow_val_change=True,
            dir=str(facts.folder.absolute()),
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                x_disable_meta=True,
                finish_timeout=CLOSE_SECONDS - 5,
                finish_timeout_raises=True,
            ),
        )
        # Offline, nobody but we knows what was logged.
        unknown = facts.known if self._run.offline else -1
        self.last_step = self._run.starting_step - 1 if self._run.resumed else unknown

    def log(self, metrics: Metrics, *, step: int) -> None:
        """All numbers of a step at once."""
        self._run.log(dict(metrics), step=step)

    def log_answers(self, answers: Sequence[tuple[str, str]], *, step: int) -> None:
        """A table a step."""
        import wandb

        table = wandb.Table(columns=["prompt", "answer"], data=list(map(list, answers)))
        self._run.log({"answers": table}, step=step)

    def close(self, *, failed: bool) -> None:
        """Send what is held, and how the run ended."""
        self._run.finish(exit_code=int(failed))


class MlflowService:
    """A run of MLflow in the experiment of the project; ``MLFLOW_TRACKING_URI`` says where."""

    def __init__(self, facts: RunFacts) -> None:
        import mlflow
        from mlflow.exceptions import MlflowException

        self._client: Any = mlflow.MlflowClient()
        with suppress(MlflowException):  # it is there, or another run has just made it
            self._client.create_experiment(facts.project)
        found: Any = self._client.get_experiment_by_name(facts.project)
        experiment = found.experiment_id
        same = self._client.search_runs([experiment], f"tags.burnish_run = '{facts.identity}'")
        if same:
            self._run = same[0].info.run_id
            self.last_step = int(same[0].data.tags.get("burnish_step", -1))
            self._client.update_run(self._run, status="RUNNING")
        else:
            self.last_step = -1
            self._run = self._create(experiment, facts)

    def log(self, metrics: Metrics, *, step: int) -> None:
        """All numbers of a step at once, and that it has them."""
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        entries = [Metric(_mlflow_name(key), float(value), now, step) for key, value in metrics.items()]
        for first in range(0, len(entries), _MLFLOW_METRICS):
            chunk = entries[first : first + _MLFLOW_METRICS]
            self._client.log_batch(self._run, metrics=chunk, tags=[RunTag("burnish_step", str(step))])

    def log_answers(self, answers: Sequence[tuple[str, str]], *, step: int) -> None:
        """A JSON file a step."""
        table = [{"prompt": prompt, "answer": answer} for prompt, answer in answers]
        self._client.log_text(self._run, json.dumps(table, ensure_ascii=False, indent=1), f"answers/step_{step}.json")

    def close(self, *, failed: bool) -> None:
        """Say how it ended."""
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")

    def _create(self, experiment: str, facts: RunFacts) -> str:
        from mlflow.entities import Param

        tags = {_mlflow_name(tag): "true" for tag in facts.tags if tag} | {"burnish_run": facts.identity}
        run: str = self._client.create_run(experiment, run_name=facts.name, tags=tags).info.run_id
        params = [Param(_mlflow_name(key), str(value)[:6000]) for key, value in facts.config.items()]
        for first in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(run, params=params[first : first + _MLFLOW_PARAMS])
        return run


def _mlflow_name(name: str) -> str:
    """``name`` where MLflow takes it, else with ``_code_`` for each character that it refuses, and no odd path."""
    plain = re.sub(r"[^/\w.\- :]", lambda found: f"_{ord(found[0]):x}_", name)
    parts = [part if part.strip(".") else part.replace(".", "_2e_") for part in plain.split("/") if part]
    return "/".join(parts)[:250]


class TrackioService:
    """A run of Trackio, whose files lie where its own environment says (``TRACKIO_DIR``)."""

    def __init__(self, facts: RunFacts) -> None:
        import trackio

        with redirect_stdout(sys.stderr):  # standard output is the command's
            self._run: Any = trackio.init(
                project=facts.project,
                # It knows runs by their names.
                name=f"{facts.name}-{facts.identity[:8]}",
                config={**facts.config, "tags": list(facts.tags)},
                resume="allow",
                embed=False,
            )
        # It tells nobody else what it has, on a server or here.
        self.last_step = self._run._next_step - 1

    def log(self, metrics: Metrics, *, step: int) -> None:
        """All numbers of a step at once."""
        self._run.log(dict(metrics), step=step)

    def log_answers(self, answers: Sequence[tuple[str, str]], *, step: int) -> None:
        """A table a step."""
        import trackio

        table = trackio.Table(columns=["prompt", "answer"], data=list(map(list, answers)))
        self._run.log({"answers": table}, step=step)

    def close(self, *, failed: bool) -> None:
        """Send what is held."""
        del failed
        with redirect_stdout(sys.stderr):
            self._run.finish()


_SERVICES: Mapping[TrackerName, tuple[str, Callable[[RunFacts], Service]]] = {
    TrackerName.TENSORBOARD: ("torch.utils.tensorboard", TensorBoardService),
    TrackerName.WANDB: ("wandb", WandbService),
    TrackerName.MLFLOW: ("mlflow", MlflowService),
    TrackerName.TRACKIO: ("trackio", TrackioService),
}
"""The module to import, and what to make of it."""


def open_service(name: TrackerName, facts: RunFacts) -> Guarded:
    """The service of that ``name``. Its library is imported now; what may hang, it does meanwhile."""
    module, make = _SERVICES[name]
    with suppress(Exception):  # the thread meets the same error, and says it
        import_module(module)
    return Guarded(name, lambda: make(facts), close_seconds=CLOSE_SECONDS)
