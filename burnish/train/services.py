"""Metrics to services that keep them: TensorBoard, Weights & Biases, MLflow, Trackio. Each is an extra of its own.

Its rule: a run never ends, and never fails, for a service: an error is said once, and that service is left alone from then on.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.choices import TrackerName
from burnish.log import get_logger
from burnish.train.trackers import Metrics, Tracker

log = get_logger(__name__)


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
    resumed: bool


class Guarded:
    """A tracker whose errors are warnings; steps up to ``after`` are there already and not sent again."""

    def __init__(self, name: str, make: Callable[[], Tracker], *, after: int) -> None:
        self._name, self._after = name, after
        self._tracker: Tracker | None = None
        self._try(lambda: self._set(make()))

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Send numbers that are finite; repeated steps of a resumed run are the same to the bit."""
        tracker = self._tracker
        if tracker is not None and step > self._after:
            self._after = step
            numbers = {key: value for key, value in metrics.items() if _is_number(value)}
            self._try(lambda: tracker.log(numbers, step=step))

    def close(self) -> None:
        """Send the rest."""
        if self._tracker is not None:
            self._try(self._tracker.close)

    def _set(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - of whatever kind, training goes on
            self._tracker = None
            log.warning("%s is left alone from here on (%s: %s)", self._name, type(error).__name__, error)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class TensorBoardTracker:
    """Event files in ``{folder}/tensorboard``."""

    def __init__(self, facts: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(facts.folder / "tensorboard"))  # type: ignore[no-untyped-call]
        if not facts.resumed:
            lines = [f"    {key}: {value}" for key, value in facts.config.items()]
            self._writer.add_text("config", "\n".join([*lines, f"    tags: {', '.join(facts.tags)}"]), 0)

    def log(self, metrics: Metrics, *, step: int) -> None:
        """One scalar each."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Write what is held."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases; its own environment (``WANDB_MODE``, ``WANDB_API_KEY``) decides where to."""

    def __init__(self, facts: RunFacts) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=facts.project,
            name=facts.name,
            id=facts.identity,
            resume="allow",
            tags=list(facts.tags),
            config=dict(facts.config),
            dir=str(facts.folder),
        )

    def log(self, metrics: Metrics, *, step: int) -> None:
        """All numbers of a step at once."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Send what is held."""
        self._run.finish()


class MlflowTracker:
    """A run of MLflow in the experiment of the project; ``MLFLOW_TRACKING_URI`` says where."""

    def __init__(self, facts: RunFacts) -> None:
        import mlflow

        self._client: Any = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(facts.project)
        experiment = found.experiment_id if found else self._client.create_experiment(facts.project)
        same = self._client.search_runs([experiment], f"tags.burnish_run = '{facts.identity}'")
        if same:
            self._run = same[0].info.run_id
            return
        tags = {"burnish_run": facts.identity, **dict.fromkeys(facts.tags, "true")}
        self._run = self._client.create_run(experiment, run_name=facts.name, tags=tags).info.run_id
        for key, value in facts.config.items():
            self._client.log_param(self._run, key, str(value)[:6000])

    def log(self, metrics: Metrics, *, step: int) -> None:
        """All numbers of a step at once."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = [Metric(key, float(value), now, step) for key, value in metrics.items()]
        self._client.log_batch(self._run, metrics=batch)

    def close(self) -> None:
        """Say that it ended."""
        self._client.set_terminated(self._run)


class TrackioTracker:
    """A run of Trackio, whose files lie where its own environment says."""

    def __init__(self, facts: RunFacts) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=facts.project,
            # Trackio knows runs by their names.
            name=f"{facts.name}-{facts.identity[:6]}",
            config={**facts.config, "tags": list(facts.tags)},
            resume="allow",
            embed=False,
        )

    def log(self, metrics: Metrics, *, step: int) -> None:
        """All numbers of a step at once."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Send what is held."""
        self._run.finish()


_SERVICES: Mapping[TrackerName, Callable[[RunFacts], Tracker]] = {
    TrackerName.TENSORBOARD: TensorBoardTracker,
    TrackerName.WANDB: WandbTracker,
    TrackerName.MLFLOW: MlflowTracker,
    TrackerName.TRACKIO: TrackioTracker,
}


def open_service(name: TrackerName, facts: RunFacts, *, after: int) -> Guarded:
    """The tracker of that ``name``; it has had the steps up to ``after``."""
    return Guarded(name, lambda: _SERVICES[name](facts), after=after)
