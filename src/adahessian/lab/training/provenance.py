"""Where a result comes from: command, commit, date, hardware and versions."""

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

# Only the package's code decides a number, so changes to tests, pages and earlier results do not count.
_PACKAGE = Path(__file__).parents[2]


def provenance(seed: int | list[int]) -> dict[str, Any]:
    """Return command, commit, date, seed, hardware and versions of this process, as plain values."""
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
            "torch": str(torch.__version__),  # a plain string, which checkpoints may hold
        },
    }


def commit() -> str | None:
    """Return the commit of this package, with ``-dirty`` if its code was changed, or None outside of a git checkout.

    The environment variable ``ADAHESSIAN_COMMIT`` overrides it, for machines that receive the files without their
    history. A package that git does not track has no commit, even if its virtual environment lies in a checkout.
    """
    if override := os.environ.get("ADAHESSIAN_COMMIT"):
        return override
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    newest = _git("rev-parse", "HEAD")
    return f"{newest}-dirty" if newest and _git("diff", "--stat", "HEAD", "--", str(_PACKAGE)) else newest


def _command() -> str:
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name  # python -m
    return shlex.join([name, *sys.argv[1:]])


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=True)
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
