"""What a rank does: train, or evaluate. A signal ends the training after the step at hand, saved on all ranks."""

import os
import platform
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from burnish.assemble.backend import build_backend
from burnish.assemble.data import build_eval_sets
from burnish.assemble.model import require_valid
from burnish.assemble.run import build_checkpointer, build_run, find_checkpoint, open_data
from burnish.backends.comm import Ranks
from burnish.config import Purpose, SFTConfig
from burnish.errors import CheckpointError, DataError, LaunchError
from burnish.launch.contact import Contact
from burnish.launch.rank import Place, placed
from burnish.launch.signals import heeded
from burnish.log import get_logger
from burnish.train.evaluation import evaluate as evaluate_sets

log = get_logger(__name__)


@dataclass(slots=True)
class StopSignal:
    """The signal that asked to stop, if one did."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended; JSON-ready with ``dataclasses.asdict``."""

    result: dict[str, Any]
    """The fields of ``Progress`` after training; ``{name: {loss, perplexity, num_targets}}`` after evaluation."""
    exit_status: int
    """0 done; 128 + the signal's number when a signal ended it before its last step."""


def train(config: SFTConfig) -> Outcome:
    """Train what ``config`` says, to its end or to a signal to any rank."""
    stop = StopSignal()
    with (
        ExitStack() as until_all_left,
        _agreed(config) as place,
        build_run(config, ranks=place.ranks, interrupted=lambda: stop.number != 0) as trainer,
    ):
        # Not the trainer's own: what outlives it must not keep the groups of its backend, whose threads abort at exit.
        place.contact.at_loss = partial(trainer.trackers.close, failed=True)
        # A signal to all ranks reaches some when the others have made them stop already: those must not break off now.
        until_all_left.enter_context(heeded(_noting(stop, place.contact)))
        progress = trainer.train()
        place.ranks.meet("trained")
        number = max(place.ranks.gather(stop.number))
    unfinished = number and progress.step < trainer.num_steps
    if unfinished:
        log.info("stopped by %s after step %d", signal.Signals(number).name, progress.step)
    return Outcome(asdict(progress), 128 + number if unfinished else 0)


def evaluate(config: SFTConfig) -> Outcome:
    """Evaluate ``model.path``, or the checkpoint ``resume_from``, on the evaluation sets of ``config``."""
    with _agreed(config) as place:
        card = require_valid(config, purpose=Purpose.EVALUATE)
        _, evals = open_data(config, card, place.ranks, purpose=Purpose.EVALUATE)
        if not evals:
            fix = "name one in eval_datasets or eval_pretokenized_dataset_paths"
            raise DataError("eval", "no evaluation set", fix=fix)
        checkpoint = find_checkpoint(config, build_checkpointer(config, [], place.ranks))
        if config.resume_from and checkpoint is None:
            fix = "name another ckpt_path, or leave resume_from out to evaluate model.path"
            raise CheckpointError(config.ckpt_path, "there is no complete checkpoint to evaluate", fix=fix)
        log.info("evaluating %s", checkpoint or config.model.path)
        with closing(build_backend(config, ranks=place.ranks, num_steps=1, num_sources=1)) as backend:
            if checkpoint:
                backend.load(checkpoint / "backend", weights_only=True)
            metrics = evaluate_sets(backend, sets=build_eval_sets(config, card, evals, layout=backend.layout))
    numbers = ("loss", "perplexity", "num_targets")
    return Outcome({name: {number: metrics[f"eval/{name}/{number}"] for number in numbers} for name in evals}, 0)


TASKS = {Purpose.TRAIN: train, Purpose.EVALUATE: evaluate}


@contextmanager
def _agreed(config: SFTConfig) -> Iterator[Place]:
    """The place of this process among ranks that all were given ``config``."""
    with placed() as place:
        require_same(config, place.ranks)
        yield place


def require_same(config: SFTConfig, ranks: Ranks) -> None:
    """Compare the ``config`` of all ranks; where each keeps its cache is its own matter.

    Raises:
        LaunchError: two differ.
    """
    if ranks.world_size == 1:
        return
    plain = config.to_plain()
    found = ranks.gather([platform.node(), plain])
    for rank, (node, other) in enumerate(found):
        for key, value in found[0][1].items():
            if key != "cache_dir" and other[key] != value:
                problem = f"has {key}={other[key]!r}, and rank 0 on {found[0][0]} {value!r}"
                raise LaunchError(
                    f"rank {rank} on {node}", problem, fix="start all ranks with the same RUN.yaml and words"
                )


def _noting(stop: StopSignal, contact: Contact) -> Callable[[int], None]:
    """Notes the first signal in ``stop``. Schedulers repeat SIGTERM, so only a SIGINT after it ends the run at once."""

    def note(number: int) -> None:
        if contact.lost() is not None:
            contact.say_lost()
            raise SystemExit(1)
        if stop.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not stop.number:
            stop.number = number
            if contact.rank == 0:
                # Not through the log: the signal may have come while it was writing.
                os.write(2, b"stopping: the step is finished and saved first; Ctrl-C (again) ends at once\n")

    return note
