"""Tasks on tiny data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adahessian.lab.configs import find_preset
from adahessian.lab.tasks.task import Env, Task, load_task

_MODEL = {"layers": 1, "width": 16, "feed_forward": 16}
_TRANSLATION = {**_MODEL, "batch_size": 128, "heads": 2, "vocabulary": 300, "beam_size": 2}
_WORDS = {**_MODEL, "batch_size": 4, "segment": 8, "head_width": 4}
_GPT = {"batch_size": 4, "layers": 1, "width": 8, "heads": 2, "context": 8}
_PINN = {"points": 16, "width": 8}
_GLUE = {"batch_size": 8, "model": "small", "max_length": 16}

# Options that make each task small.
SMALL: dict[str, dict[str, Any]] = {
    "cifar10-resnet20": {"batch_size": 4, "depth": 8},
    "image-folder-resnet18": {"batch_size": 4, "image_size": 16, "workers": 0},
    "imagenet-resnet18": {"batch_size": 4, "image_size": 32, "workers": 0},
    **dict.fromkeys(["multi30k-de-en", "iwslt14-de-en", "wmt14-en-de"], _TRANSLATION),
    **dict.fromkeys(["ptb-tensorized", "ptb-transformer", "wikitext103-tensorized"], _WORDS),
    "gpt-chars": _GPT,
    "gpt-novels": {**_GPT, "vocabulary": 300},
    **dict.fromkeys([f"glue-{name}" for name in ("rte", "mrpc", "stsb", "sst2", "qnli", "qqp", "mnli")], _GLUE),
    "minilm-sst2": _GLUE,
    "criteo-dlrm": {"batch_size": 8, "hash_size": 50, "bottom_layers": (8,), "top_layers": (8,)},
    **dict.fromkeys(["pinn-poisson-1d", "pinn-poisson-2d"], _PINN),
}


def load(name: str, data_dir: Path = Path(), *, seed: int = 3, rank: int = 0, ranks: int = 1, **options: Any) -> Task:
    """Return a task with small options, on a CPU."""
    config = find_preset(name).config("adamw" if name != "criteo-dlrm" else "adagrad")
    config = replace(config, task=replace(config.task, **{**SMALL.get(name, {}), **options}))
    env = Env(data_dir=data_dir, device=torch.device("cpu"), seed=seed, rank=rank, world_size=ranks)
    return load_task(config, env)


def alike(batches: Any, others: Any) -> bool:
    """Return whether batches, or nested tuples, lists and dicts of tensors, are equal."""
    if isinstance(batches, torch.Tensor):
        return torch.equal(batches, others)
    if isinstance(batches, dict):
        return batches.keys() == others.keys() and all(alike(batches[key], others[key]) for key in batches)
    return len(batches) == len(others) and all(map(alike, batches, others))
