"""The template of examples/ runs on its own, and resumes bit by bit after it was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "examples" / "template.py"
SECONDS = 900


def command(*launcher: str) -> list[str]:
    return [sys.executable, *launcher, str(TEMPLATE)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


def run(folder: Path, *launcher: str) -> str:
    done = subprocess.run(
        command(*launcher), cwd=folder, env=environment(), timeout=SECONDS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_until_the_first_checkpoint(folder: Path) -> None:
    """Start it, and kill it without a chance to clean up as soon as there is a checkpoint."""
    process = subprocess.Popen(command(), cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + SECONDS
    while not (folder / "checkpoint.pt").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    _, errors = process.communicate()
    assert (folder / "checkpoint.pt").exists(), errors
    if process.returncode == 0:  # it finished before it could be killed, so try again
        (folder / "checkpoint.pt").unlink()
        run_until_the_first_checkpoint(folder)


def checkpoint(folder: Path) -> Any:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def accuracy(output: str) -> float:
    return float(output.split(": ")[1].split("%")[0])


def test_killed_and_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    output = run(whole)
    assert accuracy(output) > 85

    run_until_the_first_checkpoint(stopped)
    assert 0 < checkpoint(stopped)["step"] < checkpoint(whole)["step"]
    assert run(stopped) == output
    actual, expected = checkpoint(stopped), checkpoint(whole)
    for saved in (actual, expected):
        saved["groups"], saved["state"] = (saved["optimizer"][name] for name in ("param_groups", "state"))
    for name in ("model", "ema", "state"):
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)
    for name in ("step", "schedule", "groups"):
        assert actual[name] == expected[name]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_train_together(tmp_path: Path) -> None:
    output = run(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert output.startswith("2 process(es)")
    assert accuracy(output) > 85
    groups = checkpoint(tmp_path)["optimizer"]["param_groups"]
    # 20 steps that all measure, then every fifth of 180. A measurement is the mean of all ranks and micro-batches.
    assert {group["measurements"] for group in groups} == {20 + 180 // 5}
