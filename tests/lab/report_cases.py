"""Runs that were never run, for reports of them."""

import json
import math
from dataclasses import asdict, replace

from adahessian.lab.report.tables import task_table
from adahessian.lab.runs import Result
from adahessian.lab.settings import ECONOMICAL
from adahessian.lab.tasks.registry import EXPERIMENTS

STEPS = 196


def make_run(
    optimizer="sgd",
    seed=1,
    accuracy=92.0,
    *,
    task="cifar10-resnet20",
    step=0.003,
    compiling=60.0,
    recorded=6,
    diverged=False,
    accelerator="NVIDIA H200",
    conditions=None,
    shared=False,
    name=None,
    date="2026-01-01T00:00:00+00:00",
    final=None,
    **changed,
):
    experiment = EXPERIMENTS[task]
    defaults = experiment.defaults[optimizer]
    settings = replace(defaults, **changed)
    records = [
        {
            "epoch": number,
            "step": STEPS * number,
            "train_loss": math.nan if diverged and number == recorded else 2.0 / number,
            "lr": 0.1,
            "seconds": compiling + STEPS * number * step,
            **({} if diverged and number == recorded else {experiment.curve.name: accuracy - 10 / number}),
        }
        for number in range(1, recorded + 1)
    ]
    return Result(
        task=task,
        name=name or experiment.label(optimizer, settings),
        optimizer=optimizer,
        seed=seed,
        settings=json.loads(json.dumps(asdict(settings))),
        conditions=conditions or {"device": "cuda", "precision": "tf32", "compiled": True, "processes": 1},
        shared=shared,
        epochs=records,
        final={} if diverged else final or {experiment.metric.name: accuracy},
        diverged=diverged,
        parameters=100,
        peak_bytes=2**30,
        provenance=[
            {
                "command": f"adahessian train {task} --optimizer {optimizer} --seeds {seed}",
                "commit": "0123456789",
                "date": date,
                "seed": seed,
                "hardware": {"processor": "a processor", "cores": 1, "threads": 1, "accelerator": accelerator},
                "versions": {"adahessian": "1", "python": "3", "torch": "2"},
            }
        ],
    )


def with_recomputed(run, accuracy=91.0):
    """A run of today: older ones did not record the accuracy with recomputed statistics."""
    for record in (*run.epochs[: -1 if run.diverged else None], *([] if run.diverged else [run.final])):
        record["test_accuracy_recomputed"] = accuracy
    return run


def write(run, folder):
    path = folder / f"{run.task}_{run.name}_seed-{run.seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run.to_json()))
    return path


def table_of(groups):
    return task_table(groups, groups)


def column(table, heading):
    position = list(table.headings).index(heading)
    return {row[0]: row[position] for row in table.rows}


ECONOMICAL_ON_CIFAR = ECONOMICAL | {"steady_start": True, "lr": 0.3, "weight_decay": 0.001667}
