"""When a signal to a rank counts, and when it comes too late to."""

import json
import os
import signal
import subprocess
import sys

import pytest

from burnish.config import Purpose, SFTConfig
from burnish.launch.order import ORDER, OUTCOME, write_order
from burnish.launch.signals import heeded
from tests.runs.commands import environment

SIGNALLED_AT_ITS_END = """
import os, signal
from burnish.config import Purpose
from burnish.launch import spawned
from burnish.launch.tasks import Outcome

plain = spawned.asdict
def signalled(outcome):
    os.kill(os.getpid(), signal.SIGTERM)
    return plain(outcome)
spawned.asdict = signalled
spawned.TASKS = {Purpose.TRAIN: lambda config: Outcome({"step": 3}, 0)}
spawned.main()
"""


@pytest.fixture
def handlers():
    """Those of SIGTERM and SIGINT, set again afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_are_noted_while_the_block_runs(handlers):
    noted = []
    with heeded(noted.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert noted == [signal.SIGTERM, signal.SIGINT]
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_what_is_set_meanwhile_stays(handlers):
    """A rank that has failed is deaf to SIGTERM for the rest of its life."""
    with heeded(print):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]


def test_a_signal_after_the_end_changes_no_outcome(tmp_path):
    config = SFTConfig(model={"path": "m"}, train_datasets=["d"])
    write_order(tmp_path, config, purpose=Purpose.TRAIN, environment={})
    command = [sys.executable, "-c", SIGNALLED_AT_ITS_END, str(tmp_path / ORDER)]
    done = subprocess.run(
        command, env=environment(tmp_path) | {"RANK": "0"}, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / OUTCOME).read_text()) == {"result": {"step": 3}, "exit_status": 0}
