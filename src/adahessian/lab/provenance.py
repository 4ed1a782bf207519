"""Where a result comes from: what every file of results says about itself."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import adahessian


def provenance(*, seed: int | list[int]) -> dict[str, Any]:
    """Command, commit, date, seed, hardware and versions of this run."""
    return {
        "command": _command(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": seed,
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "adahessian": adahessian.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # plain, so that checkpoints may hold it
        },
    }


# What a number depends on: not on tests, words, or numbers that were measured before.
_PACKAGE = Path(__file__).parents[1]


def commit() -> str | None:
    """The commit of this code, with ``-dirty`` behind it if code was changed since; None outside a git checkout.

    The environment variable ``ADAHESSIAN_COMMIT`` says it instead where it is set: on a machine that was sent the files
    without their history, or onto an older one. That the folder lies in a checkout is not enough: a virtual environment
    often does, and what is installed in it is not what the checkout tracks.
    """
    said = os.environ.get("ADAHESSIAN_COMMIT")
    if said:
        return said
    if _git("ls-files", "--error-unmatch", "__init__.py", folder=_PACKAGE) is None:
        return None
    changes = _git("diff", "--stat", "HEAD", "--", str(_PACKAGE), folder=_PACKAGE)
    newest = _git("rev-parse", "HEAD", folder=_PACKAGE)
    return f"{newest}-dirty" if newest and changes else newest


def _command() -> str:
    program = Path(sys.argv[0])
    # A package that runs by ``python -m``.
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])


def _git(*arguments: str, folder: Path) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
