"""One node of a run on Ray: it starts its ranks as processes, passes on what they say, and tells how they ended.

The rule: an error that the user can mend is put on the board, never raised, as Ray Train would start the run again.
"""

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from types import ModuleType, TracebackType
from typing import Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

import burnish
from burnish.assemble.outputs import run_folder
from burnish.config import Purpose, SFTConfig, load_config
from burnish.errors import BurnishError, LaunchError
from burnish.launch.order import OUTCOME, write_order
from burnish.launch.ray_board import Board, BoardThere
from burnish.train.checkpoint import complete_checkpoints

_POLL_SECONDS = 0.3
_TO_END, _AT_ONCE = 15.0, 5.0
"""Seconds in which ranks have ended when one has failed, here or elsewhere; when the user will not wait."""
_TO_LEARN = 3.0
_MENDABLE = 2


def run_node(
    ray: ModuleType, *, config: str, purpose: str, folder: str, code: str, num_nodes: int, num_ranks: int, actor: Any
) -> None:
    """Run the ranks of this node, as a worker of Ray Train; returns when the run is over.

    Args:
        ray: with Ray Train.
        config: as YAML.
        purpose: training or evaluation.
        folder: where the command was given; the ranks begin there.
        code: hash of the command's Burnish.
        num_nodes: of the run, one worker each.
        num_ranks: processes a node.
        actor: of the board.

    Raises:
        RuntimeError: a rank died. Ray Train starts all nodes again.
    """
    board, node_rank = BoardThere(actor), ray.train.get_context().get_world_rank()
    start = ray.util.get_current_placement_group().id.hex()
    if _is_over(board):
        return  # the reason of the last failure came too late for Ray Train
    try:
        require_fit(folder=folder, code=code)
        os.chdir(folder)
        if node_rank == 0:
            address = ray.util.get_node_ip_address()
            # Held to the end: ranks need seconds to come, and a port that was only found would be another's by then.
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            board.put(start, {"address": address, "port": store.port, "words": start_words(config, board)})
        plan = _awaited(start, board)
        if plan is None:
            return
        mine = [*plan["words"], f"placement.num_gpus_per_node={num_ranks}"]
        first = node_rank * num_ranks
        places = [
            {
                "RANK": str(first + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(num_nodes * num_ranks),
                "MASTER_ADDR": plan["address"],
                "MASTER_PORT": str(plan["port"]),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            for local in range(num_ranks)
        ]
        run_ranks(_read(config, mine), places, purpose=Purpose(purpose), board=board)
    except BurnishError as error:
        board.put("error", error.to_json())


def code_hash() -> str:
    """Of the source of this Burnish: ranks with different ones must not train together."""
    package, digest = Path(burnish.__file__).parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def require_fit(*, folder: str, code: str) -> None:
    """See that this node can take part.

    Raises:
        LaunchError: it lacks the folder where the command was given, or has another Burnish.
    """
    node = f"node {platform.node()}"
    if code != code_hash():
        raise LaunchError(node, "has another Burnish than the command", fix="install the same version on all nodes")
    if not Path(folder).is_dir():
        fix = "give the command in a folder that all nodes have, best on a disk that they share"
        raise LaunchError(node, f"has no folder {folder}, where the command was given", fix=fix)


def start_words(config: str, board: Board) -> list[str]:
    """What this start reads beside ``config``, a YAML: nothing if it is the first, else where it goes on."""
    read = _read(config, [])
    before, now = board.get("begun"), _complete_steps(read)
    if before is None:
        board.put("begun", now)
        return []
    words = restart_words(read, before=before, now=now)
    board.tell(f"starting again: {', '.join(words) or 'as at first'}\n")
    return words


def restart_words(config: SFTConfig, *, before: Sequence[int], now: Sequence[int]) -> list[str]:
    """What a run that is started again reads beside ``config``, so that it goes on from its own latest checkpoint.

    Args:
        config: that of the first start.
        before: steps of the complete checkpoints that were there then.
        now: those that are there.
    """
    if not config.ckpt_path or (config.resume_from == "latest" and not config.resume_weights_only):
        return []
    own = set(now) - set(before)
    if own:
        latest = "latest" if max(own) == max(now) else f"{config.ckpt_path.rstrip('/')}/global_step_{max(own)}"
        return [f"resume_from={latest}", "resume_weights_only=false"]
    return [] if config.resume_from or before else ["resume_from=latest"]


def run_ranks(config: SFTConfig, places: Sequence[Mapping[str, str]], *, purpose: Purpose, board: Board) -> None:
    """Run a process for each of ``places`` to its end; the board hears what they say and how they end.

    Args:
        config: what they do.
        places: ``RANK`` and its like, of each.
        purpose: training or evaluation.
        board: that of all nodes.

    Raises:
        LaunchError: there is no place for their logs.
        RuntimeError: one died, and not of an error that the user can mend.
    """
    logs = run_folder(config) / "ranks"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be written on node {platform.node()}: {error.strerror}"
        raise LaunchError(f"log_dir={config.log_dir}", problem, fix="give a folder that can be written") from error
    with TemporaryDirectory(prefix="burnish-ray-") as own, ExitStack() as stack:
        command = (sys.executable, *write_order(Path(own), config, purpose=purpose, environment={}))
        ranks = [stack.enter_context(_Rank(command, place, logs=logs, board=board)) for place in places]
        _watch(ranks, board, grace_seconds=config.shutdown_grace_seconds)
        file = Path(own, OUTCOME)
        outcome = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    died = [rank.died for rank in ranks if rank.died]
    time.sleep(_TO_LEARN if died else 0)  # another node may know the reason: one that the user can mend
    if died and not _is_over(board):
        board.tell("".join(f"{text}\n" for text in died))
        raise RuntimeError("; ".join(died))
    if outcome:
        board.put("outcome", outcome)


class _Rank:
    """A process; what it says goes to its log and to the board."""

    def __init__(self, command: Sequence[str], place: Mapping[str, str], *, logs: Path, board: Board) -> None:
        self._number, self._board = place["RANK"], board
        self._log = (logs / f"rank_{self._number}.log").open("ab")
        self._process = subprocess.Popen(
            command,
            env=os.environ | place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join(_AT_ONCE)  # a process of its own may still hold the pipe

    @property
    def code(self) -> int | None:
        """Its exit status, or the signal that killed it, negative; none while it runs."""
        return self._process.poll()

    @property
    def died(self) -> str:
        """How it failed; empty if it did not."""
        if not self.code:
            return ""
        how = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with {self.code}"
        return f"rank {self._number} on {platform.node()} {how}"

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines, self._log as log:
            for line in lines:
                log.write(line)
                log.flush()
                self._board.tell(line.decode(errors="replace"))


def _watch(ranks: Sequence[_Rank], board: Board, *, grace_seconds: float) -> None:
    """Return when all have ended. What the user wishes reaches them, and where one failed none stays for long."""
    obeyed, deadline = None, float("inf")
    while None in (codes := [rank.code for rank in ranks]):
        wish = board.get("stop")
        if wish != obeyed:
            obeyed = wish
            number, seconds = (signal.SIGTERM, grace_seconds) if wish == "saved" else (signal.SIGINT, _AT_ONCE)
            deadline = _send(ranks, number) + seconds
        if _MENDABLE in codes:
            board.put("failed", True)
        if any(codes) or board.get("error") or board.get("failed"):
            deadline = min(deadline, time.monotonic() + _TO_END)
        if time.monotonic() > deadline:
            _send(ranks, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    if _MENDABLE in codes:
        board.put("failed", True)


def _send(ranks: Sequence[_Rank], number: int) -> float:
    for rank in ranks:
        rank.send(number)
    return time.monotonic()


def _awaited(start: str, board: Board) -> dict[str, Any] | None:
    """The plan of this ``start``; none when the run is over before it begins."""
    plan: dict[str, Any] | None = None
    while plan is None:
        if _is_over(board):
            return None
        plan = board.get(start)
        time.sleep(0 if plan else _POLL_SECONDS)
    return plan


def _is_over(board: Board) -> bool:
    """Whether the run ends, and must not be started again."""
    return any(map(board.get, ("stop", "error", "failed")))


def _complete_steps(config: SFTConfig) -> list[int]:
    if not config.ckpt_path:
        return []
    return sorted(complete_checkpoints(config.ckpt_path))


def _read(config: str, words: Sequence[str]) -> SFTConfig:
    with TemporaryDirectory(prefix="burnish-ray-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config, encoding="utf-8")
        return load_config(file, words)
