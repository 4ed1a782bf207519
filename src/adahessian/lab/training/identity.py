"""What distinguishes a run from others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from adahessian.lab.configs.run import NOT_IDENTITY, Run, Session, as_json
from adahessian.lab.results.run_file import RunResult


def effective_precision(session: Session, device: torch.device) -> str:
    """Return the precision of matrix products on a device. Only GPUs have tf32."""
    return "float32" if session.precision == "tf32" and device.type != "cuda" else session.precision


def identity(run: Run | RunResult, precision: str, processes: int) -> dict[str, Any]:
    """Return what distinguishes a run from others, as it comes out of a file."""
    config = json.loads(json.dumps(run.config if isinstance(run.config, dict) else as_json(run.config)))
    options = {**config.pop("task"), **config.pop("optimizer"), **config.pop("schedule"), **config}
    named = {f"--{name.replace('_', '-')}": value for name, value in options.items() if name not in NOT_IDENTITY}
    own = {"task": run.task, "optimizer": run.optimizer, "seed": run.seed}
    return {**own, "precision": precision, "processes": processes, **named}


def changed(identity: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the names of the values that differ. Options that only one of both has are ignored."""
    return ", ".join(name for name, value in identity.items() if name in other and other[name] != value)
