"""Settings that must be made before Triton is imported, and what tests of several files share."""

import json
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from adahessian.lab.provenance import provenance
from adahessian.messages import say_once

if not torch.cuda.is_available():
    # Triton's interpreter runs the fused kernels on a CPU; Triton asks for it when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, help="write what became of each test to this JSON file, with provenance")


def pytest_terminal_summary(terminalreporter, config):
    if (path := config.getoption("record")) is None:
        return
    outcomes = {
        report.nodeid: kind
        for kind in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
        for report in terminalreporter.stats.get(kind, ())
    }
    record = {"provenance": provenance(seed=0), "counts": Counter(outcomes.values()), "outcomes": outcomes}
    path.write_text(json.dumps(record, indent=1) + "\n")


@pytest.fixture(autouse=True)
def _seeded():
    """Whatever ran before, a test draws the same random numbers in each run; fixtures of a module seed themselves."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture
def said(caplog):
    """What users are told, as if nothing had been said before."""
    say_once.cache_clear()
    return caplog


@pytest.fixture
def quick_compiler(monkeypatch):
    """All of torch.compile but the code that it writes, which takes seconds."""
    torch._dynamo.reset()
    original = torch.compile

    def quick(function, *, options=None, **settings):
        return original(function, backend="aot_eager", **settings)

    monkeypatch.setattr(torch, "compile", quick)
