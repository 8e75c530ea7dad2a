"""A run in this process."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from burnish import SFTConfig, SFTTrainer
from burnish.launch import local
from burnish.train.callbacks import Callback
from burnish.train.checkpoint import complete_checkpoints
from tests.toys import chat, write_jsonl


class Signals(Callback):
    """Sends itself signals during step 2."""

    def __init__(self, numbers):
        self._numbers = numbers

    def on_step_begin(self, progress, requests):
        if progress.step == 1:
            for number in self._numbers:
                os.kill(os.getpid(), number)


@pytest.fixture
def config_of(tmp_path, model_dir):
    rows = write_jsonl(tmp_path / "rows.jsonl", [chat("a", "b")] * 4)

    def make(**keys):
        base = {"model": {"path": str(model_dir)}, "train_datasets": [str(rows)], "num_workers": 0}
        base |= {"log_dir": str(tmp_path), "ckpt_path": str(tmp_path / "ckpt"), "num_steps": 5}
        return SFTConfig(**(base | keys))

    return make


def test_a_run_needs_no_main_thread(config_of):
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(SFTTrainer(config_of(num_steps=1)).train).result().step == 1


@pytest.mark.parametrize(
    ("numbers", "status"), [([signal.SIGTERM], 143), ([signal.SIGTERM] * 3, 143), ([signal.SIGINT], 130)]
)
def test_a_signal_ends_the_run_saved_however_often_a_scheduler_repeats_it(tmp_path, config_of, numbers, status):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    outcome = local.run(config_of(callbacks=[{"tests.launch.test_local.Signals": {"numbers": numbers}}]))
    assert (outcome.result["step"], outcome.exit_status) == (2, status)
    assert list(complete_checkpoints(tmp_path / "ckpt")) == [2]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_an_interrupt_after_a_signal_ends_the_run_at_once(tmp_path, config_of):
    numbers = [signal.SIGTERM, signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        local.run(config_of(callbacks=[{"tests.launch.test_local.Signals": {"numbers": numbers}}]))
    assert not complete_checkpoints(tmp_path / "ckpt")


def test_a_signal_in_the_last_step_changes_nothing(tmp_path, config_of):
    numbers = [signal.SIGTERM]
    outcome = local.run(config_of(num_steps=2, callbacks=[{"tests.launch.test_local.Signals": {"numbers": numbers}}]))
    assert (outcome.result["step"], outcome.exit_status) == (2, 0)
