"""Messages to users."""

import logging
import subprocess
import sys

from adahessian.base.log import info_once, logger, warn_once


def test_messages_are_not_repeated(said):
    for message in ("a", "b", "a"):
        warn_once(message)
        info_once(message)
    assert said.record_tuples == [
        ("adahessian", level, message) for message in ("a", "b") for level in (logging.WARNING, logging.INFO)
    ]


def test_an_application_configures_the_logger():
    assert not logger.handlers
    program = "from adahessian.base.log import *; info_once('quiet'); warn_once('loud')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == ("", "loud\n")
