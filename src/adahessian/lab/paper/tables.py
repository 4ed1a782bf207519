"""The paper's tables of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

from adahessian.lab.paper.cells import Average, Cell, Entry, PaperTable
from adahessian.lab.paper.numbers import (
    GLUE,
    GLUE_AVERAGE,
    GLUE_COLUMNS,
    SEEDS,
    SQUEEZEBERT,
    TRAINING_PERPLEXITY,
)
from adahessian.lab.report.groups import OPTIMIZER_ORDER, Group
from adahessian.lab.report.phrases import phrases
from adahessian.lab.report.tables import shown_paper
from adahessian.lab.report.wording import group_title, section_title
from adahessian.lab.settings import OPTIMIZER_TITLES, OptimizerName, Settings
from adahessian.lab.tasks.registry import EXPERIMENTS
from adahessian.lab.tasks.task import PaperNumber

_IMAGES = {"cifar10-resnet20": "ResNet20, CIFAR-10", "cifar10-resnet32": "ResNet32", "imagenet-resnet18": "ImageNet"}
_TRANSLATION = {"iwslt14-de-en": "IWSLT14", "wmt14-en-de": "WMT14"}
_LANGUAGE = {"ptb-tensorized": "PTB", "wikitext103-tensorized": "WikiText-103"}

_OF_EVERY_TASK = frozenset(field.name for field in fields(Settings))
# Settings of other data, and of another network than the paper's.
_STANDING_IN = frozenset({"file", "model"})


def result_tables() -> Iterator[PaperTable]:
    """Final results, as the paper has them."""
    yield _results(
        "Table 2: image classification, accuracy in %",
        _IMAGES,
        note="Ours is the last epoch's. The authors' script for CIFAR-10 reports the best epoch on the test set, which "
        "adahessian report shows beside it.",
    )
    yield _results(
        "Table 3: translation, BLEU",
        _TRANSLATION,
        note="BLEU on words: case is ignored on IWSLT14, and counts on WMT14.",
    )
    yield _results(
        "Table 4: language modelling, test perplexity",
        _LANGUAGE,
        note="Ours is causal. The tensorized transformer's own code takes a mask and never applies it: compare "
        "optimizers with each other rather than with the paper.",
        digits=1,
    )
    yield _training_perplexity()
    yield _glue()
    yield _results("Figure 6: click prediction on Criteo, test accuracy in %", {"criteo-dlrm": "Criteo"})


def _seeds(number: PaperNumber | None) -> int:
    return SEEDS if number is not None and number.deviation is not None else 1


def _results(title: str, tasks: Mapping[str, str], note: str = "", digits: int | None = None) -> PaperTable:
    """Final results of tasks; ``digits`` are those of the paper, where they are not the metric's."""
    experiments = [EXPERIMENTS[task] for task in tasks]
    optimizers = [name for name in OPTIMIZER_ORDER if any(name in each.paper for each in experiments)]
    rows: list[list[Entry]] = []
    for optimizer in optimizers:
        row: list[Entry] = [OPTIMIZER_TITLES[optimizer]]
        for experiment in experiments:
            number = experiment.paper.get(optimizer)
            row += [
                shown_paper(number, digits or experiment.metric.digits),
                Cell(task=experiment.name, optimizer=optimizer, seeds=_seeds(number)) if number else "",
            ]
        rows.append(row)
    headings = ["optimizer", *(f"{name}, {whose}" for name in tasks.values() for whose in ("paper", "ours"))]
    return PaperTable(title=title, headings=headings, rows=rows, note=note)


def _training_perplexity() -> PaperTable:
    rows: list[list[Entry]] = []
    optimizers: tuple[OptimizerName, ...] = ("adamw", "adahessian")
    for optimizer in optimizers:
        row: list[Entry] = [OPTIMIZER_TITLES[optimizer]]
        for task in _LANGUAGE:
            seeds = _seeds(EXPERIMENTS[task].paper[optimizer])
            row += [
                shown_paper(TRAINING_PERPLEXITY[task][optimizer], 2),
                Cell(task=task, optimizer=optimizer, metric="train_perplexity", seeds=seeds),
            ]
        rows.append(row)
    return PaperTable(
        title="Figure 10: language modelling, final training perplexity",
        headings=["optimizer", *(f"{name}, {whose}" for name in _LANGUAGE.values() for whose in ("paper", "ours"))],
        rows=rows,
        note="Ours is that of the tested weights on the whole training text, without dropout and smoothing.",
    )


def _glue() -> PaperTable:
    rows: list[list[Entry]] = [
        ["AdamW, paper of SqueezeBERT", *(f"{number:.1f}" for number in SQUEEZEBERT[:-1]), f"{SQUEEZEBERT[-1]:.2f}"]
    ]
    for optimizer, numbers in GLUE.items():
        title = OPTIMIZER_TITLES[optimizer]
        cells = [Cell(task=task, optimizer=optimizer, metric=metric, seeds=1) for _, task, metric in GLUE_COLUMNS]
        rows.append([f"{title}, paper", *(f"{number:.2f}" for number in (*numbers, GLUE_AVERAGE[optimizer]))])
        rows.append([f"{title}, ours", *cells, Average(of=cells)])
    return PaperTable(
        title="Table 5: GLUE with SqueezeBERT, development sets",
        headings=["optimizer", *(title for title, _, _ in GLUE_COLUMNS), "average"],
        rows=rows,
        note="The average is there once all eight are. Of MRPC and QQP ours is the mean of accuracy and F1, of STS-B "
        "that of two correlations.",
    )


def stand_in_tables(groups: Sequence[Group]) -> Iterator[PaperTable]:
    """What was run of tasks that the paper does not have, and of its own on other data or with another network."""
    rows: list[list[Entry]] = []
    for group in groups:
        if group.experiment.paper and _STANDING_IN.isdisjoint(group.changed):
            continue
        others = {name: value for name, value in group.changed.items() if name not in _OF_EVERY_TASK}
        settings = {name: value for name, value in group.distinctive.items() if name not in others}
        rows.append(
            [
                ", ".join([section_title(group), *phrases(others, {})]),
                group_title(replace(group, distinctive=settings), with_conditions=False),
                group.experiment.metric.title,
                Cell(task=group.experiment.name, optimizer=group.optimizer, settings=group.changed),
            ]
        )
    if rows:
        yield PaperTable(
            title="Stand-ins: other data and networks than the paper's",
            headings=["task", "optimizer", "metric", "ours"],
            rows=rows,
            note="Not in the paper, and no measure of its numbers.",
        )
