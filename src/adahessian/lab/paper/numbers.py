"""The paper's tables, as far as they are not with the tasks: those of final results are each task's ``paper``.

What a step costs is in :data:`adahessian.lab.bench.tables.PAPER_OVERHEAD`.
"""

from __future__ import annotations

from adahessian.lab.settings import OptimizerName
from adahessian.lab.tasks.task import PaperNumber


def _numbers(means: tuple[float, ...], deviations: tuple[float, ...]) -> list[PaperNumber]:
    return [PaperNumber(mean=mean, deviation=spread) for mean, spread in zip(means, deviations, strict=True)]


# Final training perplexity, in the caption of the last figure.
TRAINING_PERPLEXITY: dict[str, dict[OptimizerName, PaperNumber]] = {
    "ptb-tensorized": {"adamw": PaperNumber(mean=31.72), "adahessian": PaperNumber(mean=29.56)},
    "wikitext103-tensorized": {"adamw": PaperNumber(mean=24.01), "adahessian": PaperNumber(mean=23.51)},
}

# GLUE, in the order of the table. Each column: its title, its task, and its metric where that is not the task's own.
GLUE_COLUMNS: tuple[tuple[str, str, str | None], ...] = (
    ("RTE", "glue-rte", None),
    ("MRPC", "glue-mrpc", None),
    ("STS-B", "glue-stsb", None),
    ("SST-2", "glue-sst2", None),
    ("QNLI", "glue-qnli", None),
    ("QQP", "glue-qqp", None),
    ("MNLI-m", "glue-mnli", None),
    ("MNLI-mm", "glue-mnli", "dev_mismatched_accuracy"),
)
GLUE: dict[OptimizerName, tuple[float, ...]] = {
    "adamw": (79.06, 90.69, 90.00, 91.28, 90.30, 89.49, 82.61, 81.84),
    "adahessian": (80.14, 91.94, 90.59, 91.17, 89.97, 89.33, 82.78, 82.62),
}
GLUE_AVERAGE: dict[OptimizerName, float] = {"adamw": 86.91, "adahessian": 87.32}
# Of SqueezeBERT's own paper, with AdamW; the average is the last.
SQUEEZEBERT = (71.8, 89.8, 89.4, 92.0, 90.5, 89.4, 82.9, 82.3, 86.01)

# The task of both sweeps.
SWEPT_TASK = "iwslt14-de-en"

LR_FACTORS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 10.0)
LR_SWEEP: dict[OptimizerName, list[PaperNumber | None]] = {
    # AdamW diverges at the last.
    "adamw": [
        *_numbers((35.42, 35.66, 35.37, 35.18, 34.79, 14.41, 0.41), (0.09, 0.11, 0.07, 0.07, 0.15, 13.25, 0.32)),
        None,
    ],
    "adahessian": [
        *_numbers(
            (35.33, 35.79, 35.21, 34.74, 34.19, 33.78, 32.70, 32.48),
            (0.10, 0.06, 0.14, 0.10, 0.06, 0.14, 0.10, 0.83),
        )
    ],
}

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCK_SWEEP = _numbers(
    (35.67, 35.66, 35.78, 35.77, 35.67, 35.79, 35.72, 35.67), (0.10, 0.07, 0.07, 0.08, 0.08, 0.06, 0.06, 0.11)
)

# Steps from one measurement of the Hessian to the next, after so many epochs of measuring at every step.
DELAYS = (1, 2, 3, 4, 5)
DELAY_AFTER_EPOCHS = 5.0
DELAYED: dict[str, list[PaperNumber]] = {
    "cifar10-resnet20": _numbers((92.13, 92.40, 92.06, 92.17, 92.16), (0.08, 0.04, 0.18, 0.21, 0.12)),
    "cifar10-resnet32": _numbers((93.08, 92.91, 92.95, 92.93, 93.00), (0.10, 0.14, 0.17, 0.24, 0.10)),
}
THEORETICAL_COST = (2.0, 1.5, 1.33, 1.25, 1.2)

# Runs of each cell that has a standard deviation.
SEEDS = 5
