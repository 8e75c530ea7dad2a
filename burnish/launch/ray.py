"""A run on a Ray cluster: Ray Train holds its nodes, this process shows what the ranks say and passes signals on.

The rule: what a user can mend ends the run at once; any other failure starts it again from its latest checkpoint, at
most ``MAX_FAILURES`` times.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from burnish.config import Purpose, SFTConfig, find_problems
from burnish.config.rules_devices import processes_per_node
from burnish.errors import ConfigError, LaunchError, revived
from burnish.launch.ray_board import Board, BoardHere, BoardThere
from burnish.launch.ray_fit import fit
from burnish.launch.ray_node import code_hash
from burnish.launch.signals import heeded
from burnish.launch.tasks import Outcome
from burnish.log import configure_logging, get_logger

log = get_logger(__name__)

MAX_FAILURES = 3
"""Times that a run is started again; nodes that the cluster says it takes away are not counted."""
_POLL_SECONDS = 0.3
_LOOK = "look into the logs of Ray, and start again"


def run(config: SFTConfig, *, purpose: Purpose = Purpose.TRAIN) -> Outcome:
    """Train or evaluate what ``config`` says on the cluster that Ray finds, else on one of this machine.

    Raises:
        ConfigError: rules between keys are broken.
        LaunchError: there is no Ray, no room, or a node lacks what the run needs.
        SystemExit: a rank failed; why stands on stderr. 2 when the user can mend it, else 1.
    """
    configure_logging(rank=0)
    ray = import_ray("train")
    with cluster(ray) as is_own:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        num_gpus = int(max(node.get("GPU", 0) for node in nodes))
        if problems := find_problems(config, purpose=purpose, num_devices=num_gpus):
            raise ConfigError(problems)
        bundle = {"CPU": processes_per_node(config, num_gpus)}
        bundle |= {"GPU": bundle["CPU"]} if num_gpus else {}
        _require_room(nodes, bundle, num_nodes=config.placement.num_nodes, can_grow=not is_own)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        beside = {"num_cpus": 0, "scheduling_strategy": here}
        actor = ray.remote(BoardHere).options(**beside).remote()
        order = {
            "config": config.to_yaml(),
            "purpose": str(purpose),
            "folder": str(Path.cwd()),
            "code": code_hash(),
            "num_nodes": config.placement.num_nodes,
            "num_ranks": bundle["CPU"],
            "actor": actor,
        }
        # In a process of its own: Ray Train waits without end, and catches signals that are ours.
        fitted = ray.remote(fit).options(**beside, max_retries=0).remote(order, bundle=bundle, limit=MAX_FAILURES)
        try:
            return _followed(ray, fitted, BoardThere(actor))
        except ray.exceptions.RayError as error:
            said = str(error).strip().splitlines()[-1]
            raise LaunchError("launcher=ray", f"Ray failed ({said})", fix=_LOOK) from error


def _require_room(
    nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, int], *, num_nodes: int, can_grow: bool
) -> None:
    fitting = sum(all(node.get(name, 0) >= number for name, number in bundle.items()) for node in nodes)
    if fitting >= num_nodes:
        return
    wanted = " and ".join(f"{number} {name}s" for name, number in bundle.items())
    problem = f"{fitting} of its nodes have {wanted}, the run needs {num_nodes}"
    if not can_grow:
        fix = "name the cluster in RAY_ADDRESS, or ask for less in placement"
        raise LaunchError("the Ray cluster of this machine alone", problem, fix=fix)
    log.warning("the Ray cluster has no room yet: %s; waiting for more nodes", problem)


def _followed(ray: ModuleType, fitted: Any, board: Board) -> Outcome:
    """Show what the nodes tell until ``fitted`` is there; signals that come meanwhile reach the ranks."""
    signals: list[int] = []
    with heeded(signals.append):
        while not ray.wait([fitted], timeout=_POLL_SECONDS)[0]:
            _show(board)
            if signals:
                board.put("stop", "at once" if signal.SIGINT in signals[1:] else "saved")
                if board.get("begun") is None:
                    raise SystemExit(128 + signals[0])
        kind, said = ray.get(fitted)
        _show(board)
    if told := board.get("error"):
        raise revived(told)
    outcome, failed = board.get("outcome"), board.get("failed")
    if outcome and not failed and not kind:
        status = 128 + signals[0] if signals and outcome["exit_status"] else outcome["exit_status"]
        return Outcome(outcome["result"], status)
    if signals:
        raise SystemExit(128 + signals[0])
    if kind == "WorkerGroupError" and not failed:
        log.error("given up: ranks failed %d times; the last time: %s", MAX_FAILURES + 1, said)
    elif kind and not failed:
        raise LaunchError("launcher=ray", f"Ray failed ({kind}: {said})", fix=_LOOK)
    raise SystemExit(2 if failed else 1)


def _show(board: Board) -> None:
    sys.stderr.write("".join(board.read()))
    sys.stderr.flush()


def import_ray(library: str) -> ModuleType:
    """Ray with its ``library``, ``data`` or ``train``.

    Raises:
        LaunchError: they are not installed.
    """
    try:
        import ray

        __import__(f"ray.{library}")
    except ImportError as error:
        fix = "pip install 'burnish[ray]'"
        raise LaunchError("launcher=ray", f"ray.{library} cannot be imported ({error})", fix=fix) from error
    return ray


@contextmanager
def cluster(ray: ModuleType) -> Iterator[bool]:
    """Connected to the cluster of this process, of ``RAY_ADDRESS`` or of this machine, else to one started here.

    Yields:
        Whether it was started here.

    Raises:
        LaunchError: there is none at ``RAY_ADDRESS``.
    """
    if ray.is_initialized():
        yield False
        return
    is_own = False
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address := os.environ.get("RAY_ADDRESS"):
            fix = "start the cluster, or correct RAY_ADDRESS"
            raise LaunchError(f"RAY_ADDRESS={address}", f"Ray cannot be reached ({error})", fix=fix) from error
        ray.init(address="local", log_to_driver=False, logging_level="WARNING")
        is_own = True
    try:
        yield is_own
    finally:
        ray.shutdown()
