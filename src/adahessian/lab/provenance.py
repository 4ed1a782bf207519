"""Where a number comes from: what every file of results says about itself."""

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
    """Commit, hardware, versions, seed and command of this run."""
    return {
        "commit": _commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": seed,
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "adahessian": adahessian.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside a checkout."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
