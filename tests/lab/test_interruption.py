"""Signals that ask a run to stop."""

import os
import signal

import pytest

from adahessian.lab.interruption import Interruption


def ask(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_is_noted_and_told_once(number):
    told = []
    before = signal.getsignal(number)
    with Interruption(lambda: told.append(True)) as interruption:
        assert not interruption.asked
        ask(number)
        ask(signal.SIGTERM)
        assert interruption.asked
    assert told == [True]
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_stops_at_once():
    with Interruption() as interruption:
        ask(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            ask(signal.SIGINT)
        assert interruption.asked


def test_it_is_noted_in_the_middle_of_a_write():
    """Where Python refuses another write to the same stream."""

    def tell():
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with Interruption(tell) as interruption:
        ask(signal.SIGTERM)
        assert interruption.asked
