"""Reads the tasks of the GLUE benchmark, in the tsv files that it is published in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from adahessian.lab.data.errors import DataError


@dataclass(frozen=True, kw_only=True)
class GlueForm:
    """How the files of a task are laid out."""

    folder: str
    """Name of the task, and of its folder."""

    sentences: tuple[str, ...]
    """Columns of the sentence, or of the two sentences."""

    label: str
    """Column of the label."""

    classes: tuple[str, ...]
    """What the label may be; none for a number from 0 to 5."""

    dev: tuple[str, ...] = ("dev",)
    """Names of the development sets."""

    broken_rows: int = 0
    """Rows of another length that the published files have, at the most: those are left out."""


RTE = GlueForm(
    folder="RTE", sentences=("sentence1", "sentence2"), label="label", classes=("entailment", "not_entailment")
)
MRPC = GlueForm(folder="MRPC", sentences=("#1 String", "#2 String"), label="Quality", classes=("0", "1"))
STSB = GlueForm(folder="STS-B", sentences=("sentence1", "sentence2"), label="score", classes=())
SST2 = GlueForm(folder="SST-2", sentences=("sentence",), label="label", classes=("0", "1"))
QNLI = GlueForm(
    folder="QNLI", sentences=("question", "sentence"), label="label", classes=("entailment", "not_entailment")
)
# A few of its questions hold a line break, which tears their rows apart.
QQP = GlueForm(
    folder="QQP", sentences=("question1", "question2"), label="is_duplicate", classes=("0", "1"), broken_rows=100
)
MNLI = GlueForm(
    folder="MNLI",
    sentences=("sentence1", "sentence2"),
    label="gold_label",
    classes=("contradiction", "entailment", "neutral"),
    dev=("dev_matched", "dev_mismatched"),
)


@dataclass(frozen=True)
class Sentences:
    """The examples of a file."""

    texts: list[tuple[str, ...]]
    """Of each the sentence, or the two sentences."""

    labels: Tensor
    """Numbers of classes, or scores as float32."""


def read_sentences(folder: Path, form: GlueForm, name: str) -> Sentences:
    """Read a file of a task.

    Args:
        folder: The folder with the tasks' folders.
        form: How the task's files are laid out.
        name: Which file: ``"train"``, or one of ``form.dev``.

    Raises:
        DataError: If the file is missing or not as GLUE publishes it.
    """
    path = folder / form.folder / f"{name}.tsv"
    try:
        # Some of the files begin with a byte-order mark.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): put GLUE's folder {form.folder} with its files into {folder}"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}): download GLUE's {form.folder} again") from error
    if lines[-1] == "":
        lines.pop()
    # Quotation marks are part of the sentences, so a row is what lies between tabs and nothing else.
    rows = [line.removesuffix("\r").split("\t") for line in lines]
    return _examples(rows, form, path)


def _examples(rows: list[list[str]], form: GlueForm, path: Path) -> Sentences:
    header = rows[0] if rows else []
    if absent := [column for column in (*form.sentences, form.label) if column not in header]:
        raise DataError(
            f"{path}, line 1: there is no column {', '.join(map(repr, absent))} among {', '.join(map(repr, header))}: "
            f"this is not a training or development file of GLUE's {form.folder}"
        )
    sentences = [header.index(column) for column in form.sentences]
    label = header.index(form.label)
    texts, labels, broken = [], [], 0
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            broken += 1
            if broken > form.broken_rows:
                raise DataError(
                    f"{path}, line {line}: {len(row)} columns, but the first line names {len(header)}: the file is "
                    f"truncated or was changed, download GLUE's {form.folder} again"
                )
            continue
        texts.append(tuple(row[column] for column in sentences))
        labels.append(_label(row[label], form, f"{path}, line {line}"))
    if not texts:
        raise DataError(f"{path} has no examples: download GLUE's {form.folder} again")
    return Sentences(texts, torch.tensor(labels, dtype=torch.long if form.classes else torch.float32))


def _label(text: str, form: GlueForm, where: str) -> float:
    if form.classes:
        if text not in form.classes:
            raise DataError(f"{where}: the label is {text!r}, but it must be one of {_either(form.classes)}")
        return form.classes.index(text)
    try:
        score = float(text)
    except ValueError:
        score = float("nan")
    if not isfinite(score) or not 0 <= score <= 5:
        raise DataError(f"{where}: the score is {text!r}, but it must be a number from 0 to 5")
    return score


def _either(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
