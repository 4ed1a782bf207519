"""Where a result comes from: command, commit, date, hardware and versions."""

import os
import platform
import re
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


def provenance(seed: int) -> dict[str, Any]:
    """Return command, commit, date, seed, hardware and versions of this process, as plain values."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name  # python -m
    return {
        "command": shlex.join([name, *sys.argv[1:]]),
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
    """Return the commit of this package, with ``-dirty`` if its code was changed, or None if git does not track it.

    The environment variable ``ADAHESSIAN_COMMIT`` overrides it, for machines that receive the files without history.
    """
    if override := os.environ.get("ADAHESSIAN_COMMIT"):
        return override
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:  # a virtual environment may lie in a checkout
        return None
    newest = _git("rev-parse", "HEAD")
    return f"{newest}-dirty" if newest and _git("diff", "--stat", "HEAD", "--", str(_PACKAGE)) else newest


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", information.read_text()) if information.exists() else None
    return model[1] if model else platform.processor()
