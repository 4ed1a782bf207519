"""Run files without training."""

import json
import math
from dataclasses import asdict, fields, replace

from adahessian.lab.configs import find_preset
from adahessian.lab.configs.run import label
from adahessian.lab.results import frames
from adahessian.lab.results.run_file import RunFiles, RunResult

COST = {"exclusive": True, "step_ms": 4.0, "peak_mib": 100.0, "parameters": 10}


def make_run(optimizer="sgd", seed=1, value=92.0, *, task="cifar10-resnet20", final=None, curve=None, **options):
    """A run whose options differ from the preset's, with three evaluations. A value of NaN makes it diverge.

    Other options are its cost, device, date and selection.
    """
    stored = {"device": "cuda", "date": "2026-01-01", "selection": None, **COST, **options}
    preset = find_preset(task).config(optimizer)
    config = with_options(preset, options)
    metric, watched = config.task.metric, config.task.validation_metric
    diverged = math.isnan(value)
    steps, hardware = config.steps or 196 * config.epochs, {"processor": "a processor", "threads": 1}
    origin = {"command": f"adahessian train {task} {optimizer}", "commit": "abc", "versions": {"torch": "2"}}
    return RunResult(
        task=task,
        optimizer=optimizer,
        label=label(optimizer, config, preset),
        seed=seed,
        status="diverged" if diverged else "finished",
        config=json.loads(json.dumps(asdict(config))),
        conditions={"device": stored["device"], "precision": "tf32", "compiled": True, "processes": 1},
        curve={
            "step": [steps // 3, 2 * steps // 3, steps],
            "epoch": [config.epochs / 3, 2 * config.epochs / 3, config.epochs],
            "seconds": [1.0, 2.0, 3.0],
            "lr": [config.optimizer.lr] * 3,
            "train_loss": [2.0, 1.0, 0.5],
            **(curve or {watched.name: [0.5 * value, 0.9 * value, value]}),
        },
        final={} if diverged else final or {metric.name: value},
        cost={name: stored[name] for name in COST},
        selection=stored["selection"],
        provenance=[{**origin, "date": stored["date"], "hardware": {**hardware, "accelerator": "NVIDIA H200"}}],
    )


def with_options(config, options):
    """A config with options of its task, optimizer or schedule, or of its own."""

    def changed(part):
        return replace(part, **{each.name: options[each.name] for each in fields(part) if each.name in options})

    return replace(
        changed(config), **{name: changed(getattr(config, name)) for name in ("task", "optimizer", "schedule")}
    )


def write(folder, *runs):
    """Write run files as the laboratory does."""
    for run in runs:
        file = RunFiles(output=folder, task=run.task, label=run.label, seed=run.seed).result
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(run.to_json()))
    return folder


def rows_of(folder, *runs):
    """Rows of runs, by way of files."""
    return frames.runs([write(folder, *runs)])
