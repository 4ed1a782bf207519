"""What the library tells its users, and when it leaves that to their own logging."""

import io
import logging
import time
from types import SimpleNamespace

import pytest

from adahessian import messages
from adahessian.messages import compiling, say, say_once


@pytest.fixture
def own_stream(monkeypatch):
    """Where the library's own handler writes to."""
    (own,) = (each for each in logging.getLogger("adahessian").handlers if isinstance(each, messages._UntilConfigured))
    monkeypatch.setattr(own, "stream", io.StringIO())
    return own.stream


def test_messages_go_to_standard_error_until_logging_is_set_up(own_stream, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    say("before")
    assert own_stream.getvalue() == "adahessian: before\n"
    theirs = logging.StreamHandler(io.StringIO())
    root.addHandler(theirs)
    say("after")
    assert theirs.stream.getvalue() == "after\n"
    assert own_stream.getvalue() == "adahessian: before\n"


def test_what_need_not_be_said_again_is_not(caplog):
    say_once.cache_clear()
    for message in ("a", "b", "a"):
        say_once(message)
    assert caplog.messages == ["a", "b"]


def test_compiling_is_announced_and_its_time_told(caplog, monkeypatch):
    monkeypatch.setattr(messages, "time", SimpleNamespace(monotonic=iter((100.0, 163.0)).__next__))
    with compiling("the thing"):
        assert caplog.messages == [
            "compiling the thing: up to two minutes the first time, seconds once torch has it in its cache"
        ]
    assert caplog.messages[1:] == ["compiled the thing in 63 s"]


def test_as_long_as_it_compiles_it_says_so(caplog, monkeypatch):
    monkeypatch.setattr(messages, "_STILL_AT_IT_SECONDS", 0.02)
    with compiling("the thing"):
        deadline = time.monotonic() + 10
        while len(caplog.messages) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert caplog.messages[1].startswith("still compiling the thing, ")
    assert caplog.messages[2].startswith("still compiling the thing, ")
    time.sleep(0.1)
    count = len(caplog.messages)
    time.sleep(0.1)
    assert len(caplog.messages) == count, "nothing follows"


def test_what_did_not_compile_is_not_told_of_as_compiled(caplog):
    with pytest.raises(KeyError), compiling("the thing"):
        raise KeyError
    assert len(caplog.messages) == 1
