"""Settings that must be made before torch or Triton is imported, and fixtures of several files."""

import json
import logging
import os
import platform
import random
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

# Some virtual machines report AMX, but any bfloat16 product that uses it is an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

from adahessian.base.log import info_once, warn_once

if not torch.cuda.is_available():
    # Triton's interpreter runs the fused kernels on a CPU. Triton reads this when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser, pluginmanager):
    parser.addoption("--record", type=Path, help="write the outcome of each test to this JSON file, with provenance")
    if not pluginmanager.hasplugin("timeout"):  # its options in pyproject.toml would be errors without it
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "ignored, because pytest-timeout is not installed")


def pytest_terminal_summary(terminalreporter, config):
    if (path := config.getoption("record")) is None:
        return
    outcomes = {
        report.nodeid: kind
        for kind in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
        for report in terminalreporter.stats.get(kind, ())
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    provenance = {
        "commit": os.environ.get("ADAHESSIAN_COMMIT") or commit or None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }
    record = {"provenance": provenance, "counts": Counter(outcomes.values()), "outcomes": outcomes}
    path.write_text(json.dumps(record, indent=1) + "\n")


@pytest.fixture(autouse=True)
def _seeded():
    """Let a test draw the same random numbers in each run; fixtures of a module seed themselves."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture
def said(caplog):
    """Messages to users, as if nothing had been logged before."""
    warn_once.cache_clear()
    info_once.cache_clear()
    caplog.set_level(logging.INFO, logger="adahessian")
    return caplog


@pytest.fixture
def quick_compiler(monkeypatch):
    """All of torch.compile except for generating code, which takes seconds."""
    torch._dynamo.reset()
    original = torch.compile

    def quick(function, *, options=None, **settings):
        return original(function, backend="aot_eager", **settings)

    monkeypatch.setattr(torch, "compile", quick)
