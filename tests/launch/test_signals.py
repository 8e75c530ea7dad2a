import os
import signal

import pytest

from burnish.launch.signals import heeded


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
