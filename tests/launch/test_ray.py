"""Ranks on a Ray cluster: a run that breaks goes on from its checkpoint, and what a user can mend is told once."""

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from burnish import SFTConfig, SFTTrainer
from burnish.backends.comm import joined
from burnish.config import Purpose
from burnish.errors import DataError, LaunchError, revived
from burnish.launch import ray as on_ray
from burnish.launch import ray_node
from burnish.launch.ray_board import BoardHere
from burnish.train.callbacks import Callback
from burnish.train.checkpoint import complete_checkpoints
from tests.runs.commands import ROOT, metrics
from tests.toys import chat, write_jsonl

BURNISH = "from burnish.cli.main import run; run()"
BOUNDED = f"from burnish.launch import ray; ray.MAX_FAILURES = 0; {BURNISH}"


class KillsOnce(Callback):
    """Kills the second rank in its third step, the first time it comes there."""

    def on_step_begin(self, progress, requests):
        if progress.step == 2 and os.environ["RANK"] == "1" and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Breaks(Callback):
    """Fails on the second rank: with an error that the user can mend, or not."""

    def __init__(self, mendable):
        self._mendable = mendable

    def on_step_begin(self, progress, requests):
        if os.environ["RANK"] == "1":
            raise DataError("the rows", "are odd", fix="mend them") if self._mendable else RuntimeError("a bug")


@pytest.fixture
def words(tmp_path, model_dir):
    """The words of a run of 2 nodes with a rank each, given in the folder of the test."""
    rows = [chat(f"question {i} " + "long " * (i % 7), f"answer {i} " * 9) for i in range(50)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    keys = {"model.path": model_dir, "train_datasets": data, "num_workers": 0, "batch_size": 8, "num_steps": 300}
    keys |= {"placement.num_nodes": 2, "placement.num_gpus_per_node": 1, "launcher": "ray"}
    return ["train", *(f"{key}={value}" for key, value in keys.items())]


@contextmanager
def started(*words, folder, environment, entry=BURNISH):
    """The command in a process of its own, which does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", entry, *words],
        cwd=folder,
        env=environment | {"BURNISH_CACHE": str(folder / "cache")},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()


def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_a_signal_none(tmp_path, words, two_nodes, model_dir):
    more = ["callbacks=tests.launch.test_ray.KillsOnce", "ckpt_path=ckpt", "ckpt_interval=1", "max_ckpts_to_keep=2"]
    file, deadline = tmp_path / "runs" / "sft" / "metrics.jsonl", time.monotonic() + 400
    with started(*words, *more, folder=tmp_path, environment=two_nodes) as process:
        while process.poll() is None and not (file.exists() and '"step": 5,' in file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 143, err
    assert out == ""
    # The other rank has failed too, unless Ray ends it first; of two nodes either may be heard first.
    other = f"(rank 0 on {platform.node()} ended with 1\n)?"
    killed = f"rank 1 on {platform.node()} was killed by SIGKILL\n"
    assert re.search(f"{other}{killed}{other}starting again: resume_from=latest", err), err
    assert "see that the disk has room" not in err
    assert err.count("starting again") == err.count("INFO resumed after step") == 1
    got = metrics(tmp_path)
    assert max(complete_checkpoints(tmp_path / "ckpt")) == max(got)
    assert f"stopped by SIGTERM after step {max(got)}" in (tmp_path / "runs/sft/ranks/rank_0.log").read_text()
    config = SFTConfig(
        model={"path": str(model_dir)},
        train_datasets=[str(tmp_path / "rows.jsonl")],
        batch_size=8,
        num_steps=max(got),
        num_workers=0,
        log_dir=str(tmp_path / "alone" / "runs"),
    )
    SFTTrainer(config).train()
    losses = [line["train/loss"] for line in metrics(tmp_path / "alone").values()]
    assert [line["train/loss"] for line in got.values()] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("mendable", "status", "said"),
    [
        (True, 2, [f"rank 1 on {platform.node()}: the rows: are odd\n  fix: mend them\n"]),
        (False, 1, ["RuntimeError: a bug\n", "given up: ranks failed 1 times"]),
    ],
)
def test_failures_end_it_when_they_can_be_mended_or_are_too_many(tmp_path, words, two_nodes, mendable, status, said):
    callback = f"callbacks=[{{tests.launch.test_ray.Breaks: {{mendable: {mendable}}}}}]"
    entry = BURNISH if mendable else BOUNDED
    with started(*words, callback, folder=tmp_path, environment=two_nodes, entry=entry) as process:
        _, err = process.communicate(timeout=400)
    assert process.returncode == status, err
    assert [err.count(text) for text in said] == [1] * len(said), err
    assert "starting again" not in err


CKPT = {"ckpt_path": "b"}
GO_ON = ["resume_from=latest", "resume_weights_only=false"]


@pytest.mark.parametrize(
    ("keys", "before", "now", "words"),
    [
        ({}, [], [], []),
        (CKPT, [], [], ["resume_from=latest"]),
        (CKPT, [], [2], GO_ON),
        (CKPT, [9], [9], []),
        (CKPT, [9], [2, 9], ["resume_from=b/global_step_2", GO_ON[1]]),
        (CKPT | {"resume_from": "latest"}, [9], [9, 12], []),
        (CKPT | {"resume_from": "latest", "resume_weights_only": True}, [9], [9], []),
        (CKPT | {"resume_from": "latest", "resume_weights_only": True}, [1], [1, 2], GO_ON),
        (CKPT | {"resume_from": "a/global_step_9"}, [], [], []),
        (CKPT | {"resume_from": "a/global_step_9"}, [], [12], GO_ON),
    ],
)
def test_a_run_that_is_started_again_goes_on_from_its_own_checkpoints(keys, before, now, words):
    config = SFTConfig(model={"path": "m"}, train_datasets=["d"], **keys)
    assert ray_node.restart_words(config, before=before, now=now) == words


def test_the_first_start_notes_the_checkpoints_that_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    board = BoardHere()
    config = SFTConfig(model={"path": "m"}, train_datasets=["d"], ckpt_path="ckpt", resume_from="old").to_yaml()
    for step in (3, 4):
        (tmp_path / f"ckpt/global_step_{step}").mkdir(parents=True)
        (tmp_path / f"ckpt/global_step_{step}/COMPLETE").touch()
        assert ray_node.start_words(config, board) == ([] if step == 3 else GO_ON)
    assert board.get("begun") == [3]
    assert board.read() == [f"starting again: {', '.join(GO_ON)}\n"]


def meet() -> int:
    with joined() as ranks:
        return ranks.world_size


def test_the_store_of_the_ranks_is_there_before_they_come_and_to_their_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_node, "BoardThere", lambda actor: actor)
    group = SimpleNamespace(id=b"first")
    ray = SimpleNamespace(
        train=SimpleNamespace(get_context=lambda: SimpleNamespace(get_world_rank=lambda: 0)),
        util=SimpleNamespace(get_current_placement_group=lambda: group, get_node_ip_address=lambda: "127.0.0.1"),
    )
    seen = []

    def run_ranks(config, places, **_):
        seen.extend(places)
        store = ("127.0.0.1", int(places[0]["MASTER_PORT"]))
        socket.create_connection(store).close()
        script = "from tests.launch.test_ray import meet; assert meet() == 2"
        ranks = [subprocess.Popen([sys.executable, "-c", script], env=os.environ | place, cwd=ROOT) for place in places]
        assert [rank.wait(120) for rank in ranks] == [0, 0]
        socket.create_connection(store).close()

    monkeypatch.setattr(ray_node, "run_ranks", run_ranks)
    config = SFTConfig(model={"path": "m"}, train_datasets=["d"]).to_yaml()
    own = {"folder": str(tmp_path), "code": ray_node.code_hash()}
    board = BoardHere()
    ray_node.run_node(ray, config=config, purpose="train", **own, num_nodes=1, num_ranks=2, actor=board)
    assert [place["RANK"] for place in seen] == ["0", "1"]
    assert board.get("error") is None


def test_a_node_that_is_not_fit_is_named(tmp_path):
    node = f"node {platform.node()}"
    with pytest.raises(LaunchError, match=f"{node}: has another Burnish"):
        ray_node.require_fit(folder=str(tmp_path), code="other")
    with pytest.raises(LaunchError, match=f"{node}: has no folder /no/such"):
        ray_node.require_fit(folder="/no/such", code=ray_node.code_hash())
    ray_node.require_fit(folder=str(tmp_path), code=ray_node.code_hash())


def test_room_is_asked_for_by_the_node():
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}]
    on_ray._require_room(nodes, {"CPU": 2, "GPU": 2}, num_nodes=2, can_grow=False)
    on_ray._require_room(nodes, {"CPU": 4, "GPU": 4}, num_nodes=2, can_grow=True)
    with pytest.raises(LaunchError, match="1 of its nodes have 4 CPUs and 4 GPUs, the run needs 2") as error:
        on_ray._require_room(nodes, {"CPU": 4, "GPU": 4}, num_nodes=2, can_grow=False)
    assert "RAY_ADDRESS" in error.value.fix


RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(143)))
print("rank", os.environ["RANK"], flush=True)
{}
"""


class Later(BoardHere):
    """A board that learns ``facts`` when both ranks have begun."""

    def __init__(self, facts):
        super().__init__()
        self._later = facts
        self._begun = 0

    def tell(self, line):
        super().tell(line)
        self._begun += line.startswith("rank")
        for key, value in self._later.items() if self._begun == 2 else ():
            self.put(key, value)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Runs a script as each of two ranks of a node; the board, and the logs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_node, "_TO_END", 0.5)
    monkeypatch.setattr(ray_node, "_TO_LEARN", 0.1)
    config = SFTConfig(model={"path": "m"}, train_datasets=["d"], shutdown_grace_seconds=1)

    def make(script, *, dummy=False, **facts):
        monkeypatch.setattr(ray_node, "write_order", lambda folder, config, **order: ("-c", RANK.format(script)))
        board = Later(facts)
        places = [{"RANK": number} for number in "45"]
        mine = config.model_copy(update={"dummy_run_full_ctx": dummy})
        ray_node.run_ranks(mine, places, purpose=Purpose.TRAIN, board=board)
        folder = tmp_path / f"runs/sft{'-dummy' * dummy}/ranks"
        logs = {file.name: file.read_text() for file in folder.iterdir()}
        return board, logs

    return make


@pytest.mark.parametrize("dummy", [False, True])
def test_what_ranks_say_is_told_and_kept(ranks, tmp_path, dummy):
    board, logs = ranks("", dummy=dummy)
    assert len(list((tmp_path / "runs").iterdir())) == 1, "a dummy run has a folder of its own"
    assert sorted(board.read()) == ["rank 4\n", "rank 5\n"]
    assert logs == {"rank_4.log": "rank 4\n", "rank_5.log": "rank 5\n"}
    assert not board.get("failed")


def test_logs_that_cannot_be_written_are_an_error(ranks, tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(LaunchError, match=f"log_dir=runs: cannot be written on node {platform.node()}"):
        ranks("")


def test_an_error_that_can_be_mended_is_not_raised(ranks):
    board, _ = ranks("sys.exit(2) if os.environ['RANK'] == '5' else time.sleep(60)")
    assert board.get("failed")


@pytest.mark.parametrize(
    ("how", "said"),
    [("os.kill(os.getpid(), 9)", "was killed by SIGKILL"), ("sys.exit(1)", "ended with 1")],
)
def test_a_rank_that_dies_is_raised_and_none_stays_behind(ranks, how, said):
    with pytest.raises(RuntimeError, match=f"rank 4 on {platform.node()} {said}"):
        ranks(f"{how} if os.environ['RANK'] == '4' else time.sleep(60)")


@pytest.mark.parametrize(("script", "wish", "said"), [("time.sleep(60)", "saved", 2), ("time.sleep(60)", "at once", 0)])
def test_a_wish_to_stop_reaches_the_ranks(ranks, script, wish, said):
    board, logs = ranks(script, stop=wish)
    assert "".join(logs.values()).count("saved") == said
    assert not board.get("failed")


def test_ranks_that_do_not_save_in_time_are_killed(ranks):
    started = time.monotonic()
    ranks("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", stop="saved")
    assert time.monotonic() - started < 20


def test_ranks_do_not_wait_for_a_node_that_is_not_fit(ranks):
    ranks("time.sleep(60)", error={"kind": "LaunchError"})


WITHOUT_BURNISH = """
import json, sys
import ray
from ray import cloudpickle
from burnish.launch.ray_fit import _on_node

sent = cloudpickle.dumps(_on_node())
for name in [name for name in sys.modules if name.partition(".")[0] == "burnish"]:
    del sys.modules[name]
sys.modules["burnish"] = None


class Told:
    def remote(self, *words):
        print(json.dumps(words))


ray.get = lambda told: told
cloudpickle.loads(sent)({"actor": type("Actor", (), {"put": Told()})})
"""


def test_a_node_without_burnish_says_so():
    result = subprocess.run([sys.executable, "-c", WITHOUT_BURNISH], capture_output=True, text=True, check=True)
    key, told = json.loads(result.stdout)
    assert key == "error"
    error = revived(told)
    assert isinstance(error, LaunchError)
    assert str(error).startswith(f"node {platform.node()}: Burnish cannot be imported there")
