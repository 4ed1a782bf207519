"""How well clicks are predicted."""

from __future__ import annotations

from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch import Tensor


def click_scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy in percent, area under the ROC curve, and log loss in nats.

    Args:
        logits: Of a click.
        labels: 1 for a click, 0 for none. Where all are the same there is no area: it is NaN.
    """
    labels = labels.long()
    has_both = bool((labels != labels[0]).any())
    return {
        "accuracy": 100 * float(accuracy_score(labels, logits > 0)),
        "auc": float(roc_auc_score(labels, logits)) if has_both else float("nan"),
        "log_loss": float(log_loss(labels, logits.double().sigmoid(), labels=[0, 1])),
    }
