"""The datasets of GLUE, in the tsv files that their owners publish."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adahessian.lab.data.files import read_lines
from adahessian.lab.errors import DataError

# Batches are padded to a multiple of this, because a compiled step is compiled for each length.
LENGTHS = 32

Texts = Sequence[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Format:
    """The layout of a dataset's files."""

    folder: str
    columns: tuple[str, ...] = ("sentence1", "sentence2")  # of the sentence, or of the two sentences
    label: str = "label"
    classes: tuple[str, ...] = ("0", "1")  # none for a score from 0 to 5
    broken_rows: int = 0  # rows of another length that the published files have at most, which are left out


_ENTAILMENT = ("entailment", "not_entailment")

FORMATS = {
    "rte": Format(folder="RTE", classes=_ENTAILMENT),
    "mrpc": Format(folder="MRPC", columns=("#1 String", "#2 String"), label="Quality"),
    "stsb": Format(folder="STS-B", label="score", classes=()),
    "sst2": Format(folder="SST-2", columns=("sentence",)),
    "qnli": Format(folder="QNLI", columns=("question", "sentence"), classes=_ENTAILMENT),
    # A few questions contain a line break, which splits their rows.
    "qqp": Format(folder="QQP", columns=("question1", "question2"), label="is_duplicate", broken_rows=100),
    "mnli": Format(folder="MNLI", label="gold_label", classes=("contradiction", "entailment", "neutral")),
}


def read_sentences(folder: Path, form: Format, name: str) -> tuple[Texts, Tensor]:
    """Return the sentences of a file, such as ``"train"`` or ``"dev"``, and their classes (int64) or scores."""
    path = folder / form.folder / f"{name}.tsv"
    # Quotation marks belong to the sentences: only tabs and line feeds separate.
    header, *rows = [line.rstrip("\r\n").split("\t") for line in read_lines(path)]
    if absent := [column for column in (*form.columns, form.label) if column not in header]:
        raise DataError(f"{path}, line 1 lacks the column {absent[0]!r}. Fetch GLUE's {form.folder} again.")
    columns, label = [header.index(column) for column in form.columns], header.index(form.label)
    texts, labels, broken = [], [], 0
    for line, row in enumerate(rows, start=2):
        if len(row) == len(header):
            texts.append(tuple(row[column] for column in columns))
            labels.append(_label(row[label], form.classes, f"{path}, line {line}"))
        elif (broken := broken + 1) > form.broken_rows:
            raise DataError(f"{path}, line {line} has {len(row)} columns instead of {len(header)}. Fetch it again.")
    if not texts:
        raise DataError(f"{path} has no examples. Fetch GLUE's {form.folder} again.")
    return texts, torch.tensor(labels, dtype=torch.long if form.classes else torch.float32)


def _label(text: str, classes: Sequence[str], where: str) -> float:
    try:
        label = classes.index(text) if classes else float(text)
    except ValueError:
        label = -1
    if not 0 <= label <= 5:  # a NaN is not in this range
        allowed = f"one of {', '.join(classes)}" if classes else "a number from 0 to 5"
        raise DataError(f"{where} has the label {text!r} instead of {allowed}. Fetch the file again.")
    return label


def tokenize(texts: Texts, tokenizer: Any, max_length: int) -> dict[str, Tensor]:
    """Return sentences, or pairs of sentences, as inputs of BERT in transformers, cut to ``max_length`` tokens."""
    sentences = [list(column) for column in zip(*texts, strict=True)]
    tokens = tokenizer(*sentences, truncation=True, max_length=max_length)
    padded = tokenizer.pad(tokens, pad_to_multiple_of=LENGTHS, return_tensors="pt")
    return {name: tensor[:, :max_length] for name, tensor in padded.items()}
