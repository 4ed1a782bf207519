"""Where a result comes from: what was run, with which versions, at which commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import adahessian


def provenance() -> dict[str, Any]:
    """The command, the versions and, if the code is tracked by git, its commit."""
    packages = ("matplotlib", "numpy", "scikit-learn")
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": {
            "adahessian": adahessian.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: version(name) for name in packages},
        },
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str | None:
    """The commit of this code, with ``-dirty`` behind it if files were changed since; None outside a git checkout.

    That the folder lies in a checkout is not enough: a virtual environment often does, and what is installed in it is
    not what the checkout tracks.
    """
    this_file = Path(__file__)
    if _git("ls-files", "--error-unmatch", this_file.name, folder=this_file.parent) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*", folder=this_file.parent)


def _git(*arguments: str, folder: Path) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
