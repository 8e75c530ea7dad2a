"""Hooks for a user's own code. The loop's own work is in the loop, not here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from burnish.backends.base import StepResult
from burnish.data.batch import Batch
from burnish.errors import ConfigError, Problem
from burnish.log import get_logger
from burnish.train.progress import Progress

log = get_logger(__name__)


@dataclass(slots=True)
class Requests:
    """What a callback may ask of the loop, served after the step at hand: evaluate, then save, then stop.

    Each is cleared when it is served; ``stop`` stays. What ``on_save`` and ``on_log`` ask is served after the next step.
    """

    save: bool = False
    evaluate: bool = False
    stop: bool = False


class Callback:
    """Override what you need; every hook does nothing by default. Steps count from 1, epochs from 0."""

    def on_train_begin(self, progress: Progress, requests: Requests) -> None:
        """Once, before the first step; after a resume ``progress`` is that of the checkpoint."""

    def on_epoch_begin(self, progress: Progress, requests: Requests) -> None:
        """Before the first step of an epoch, and before the first after a resume inside one."""

    def on_step_begin(self, progress: Progress, requests: Requests) -> None:
        """Before a step; ``progress.step`` is the number of steps done."""

    def on_step_end(self, progress: Progress, requests: Requests, *, batch: Batch, result: StepResult) -> None:
        """After a step; ``progress.step`` is its number."""

    def on_evaluate(self, progress: Progress, requests: Requests, *, metrics: Mapping[str, float]) -> None:
        """After an evaluation of eval sets, with its ``eval/{name}/...`` metrics; before prompts are answered."""

    def on_save(self, progress: Progress, requests: Requests, *, folder: str) -> None:
        """After a checkpoint was begun; it is complete once ``folder``, a path or URI, holds ``COMPLETE``."""

    def on_log(self, progress: Progress, requests: Requests, *, metrics: Mapping[str, Any]) -> None:
        """After the metrics of a step went to the trackers."""

    def on_epoch_end(self, progress: Progress, requests: Requests) -> None:
        """After the step that drew the last row of an epoch; ``progress.epoch`` counts it already."""

    def on_train_end(self, progress: Progress, requests: Requests) -> None:
        """Once, after the last step, also after a stop."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state that a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""


class Callbacks:
    """The callbacks of a run as one, and the requests they share."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)
        self.requests = Requests()

    def __len__(self) -> int:
        return len(self._callbacks)

    def call(self, hook: Callable[..., None], progress: Progress, **event: Any) -> None:
        """Call ``hook`` (such as ``Callback.on_save``) on each of them."""
        for callback in self._callbacks:
            asked = self.requests.stop
            getattr(callback, hook.__name__)(progress, self.requests, **event)
            if self.requests.stop and not asked:
                log.info("callback %s asks to stop, at step %d", type(callback).__qualname__, progress.step)

    def state_dicts(self) -> list[dict[str, Any]]:
        """One state a callback, with its class."""
        return [{"class": _class_path(c), "state": c.state_dict()} for c in self._callbacks]

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give each callback the saved state of its class; the n-th of a class gets that class's n-th state."""
        remaining = list(states)
        for callback in self._callbacks:
            saved = next((s for s in remaining if s["class"] == _class_path(callback)), None)
            if saved is not None:
                remaining.remove(saved)
                callback.load_state_dict(saved["state"])


def load_callback(path: str, *, kwargs: Mapping[str, Any]) -> Callback:
    """Build the callback class at dotted ``path``.

    Raises:
        ConfigError: it cannot be imported, is no ``Callback``, or does not take ``kwargs``.
    """
    module, _, name = path.rpartition(".")
    fix = f"give module.Class of a subclass of Callback in {Path.cwd()} or an installed package, or {{path: kwargs}}"
    try:
        made = vars(import_module(module))[name](**kwargs)
    except (ImportError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([Problem("callbacks", path, f"cannot be built: {error!r}", fix)]) from error
    if not isinstance(made, Callback):
        raise ConfigError([Problem("callbacks", path, "is not a burnish.train.callbacks.Callback", fix)])
    return made


def _class_path(callback: Callback) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"
