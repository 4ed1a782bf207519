"""The numbers that GLUE is scored by, in percent."""

from __future__ import annotations

import torch
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor
from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef


def accuracy(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The share of examples whose class was found."""
    return {"accuracy": 100 * float(accuracy_score(labels, logits.argmax(-1)))}


def accuracy_and_f1(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, F1 of class 1, and the mean of both."""
    found = accuracy(logits, labels)["accuracy"]
    f1 = 100 * float(f1_score(labels, logits.argmax(-1), zero_division=0.0))
    return {"accuracy": found, "f1": f1, "accuracy_and_f1": (found + f1) / 2}


def correlation(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Pearson's and Spearman's correlation, and the mean of both. Equal scores correlate with nothing: 0."""
    scores, labels = scores.reshape(-1).double(), labels.double()
    pearson = spearman = 0.0
    if bool((scores != scores[0]).any()) and bool(torch.isfinite(scores).all()):
        pearson = 100 * float(pearson_corrcoef(scores, labels))
        spearman = 100 * float(spearman_corrcoef(scores, labels))
    return {"pearson": pearson, "spearman": spearman, "correlation": (pearson + spearman) / 2}
