"""Metrics of translation, GLUE and recommendation, as their reference libraries compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenized: bool, lowercase: bool, language: str = "en"
) -> dict[str, float]:
    """Return BLEU on words and on plain text, in percent.

    ``bleu`` compares words between spaces, as the paper's multi-bleu script does. ``bleu_detokenized`` is sacrebleu's
    score of plain text. They are the same number for text that is not tokenized.

    Args:
        hypotheses: Translations.
        references: The reference of each.
        tokenized: Whether Moses put spaces between words and punctuation.
        lowercase: Ignore case.
        language: Language of the text, for Moses.
    """
    from sacrebleu import corpus_bleu

    def score(hypotheses: Sequence[str], references: Sequence[str], tokenize: str) -> float:
        # force: no warning about tokenized text.
        return corpus_bleu(hypotheses, [references], tokenize=tokenize, lowercase=lowercase, force=True).score

    if not tokenized:
        return dict.fromkeys(("bleu", "bleu_detokenized"), score(hypotheses, references, "13a"))
    plain, plain_references = ([detokenize(text, language) for text in texts] for texts in (hypotheses, references))
    of_plain_text = score(plain, plain_references, "13a")
    return {"bleu": score(hypotheses, references, "none"), "bleu_detokenized": of_plain_text}


def detokenize(text: str, language: str = "en") -> str:
    r"""Undo the tokenization of Moses.

    Example:
        >>> detokenize("well , that &apos;s a so @-@ called &quot; test &quot; .")
        'well, that\'s a so-called "test".'
    """
    from sacremoses import MosesDetokenizer

    plain: str = MosesDetokenizer(language).detokenize(text.split())
    return plain


def accuracy(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the share of examples whose class was found, in percent."""
    from sklearn.metrics import accuracy_score

    return {"accuracy": 100 * float(accuracy_score(labels, logits.argmax(-1)))}


def accuracy_and_f1(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy, F1 of class 1, and their mean, in percent."""
    from sklearn.metrics import f1_score

    correct = accuracy(logits, labels)["accuracy"]
    f1 = 100 * float(f1_score(labels, logits.argmax(-1), zero_division=0.0))
    return {"accuracy": correct, "f1": f1, "accuracy_and_f1": (correct + f1) / 2}


def correlation(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation, and their mean, in percent. 0 where all scores are equal."""
    from scipy.stats import pearsonr, spearmanr

    scores, labels = scores.reshape(-1).double(), labels.double()
    pearson = spearman = 0.0
    if bool((scores != scores[0]).any()) and bool(torch.isfinite(scores).all()):
        pearson, spearman = (100 * float(each(scores, labels).statistic) for each in (pearsonr, spearmanr))
    return {"pearson": pearson, "spearman": spearman, "correlation": (pearson + spearman) / 2}


GLUE_SCORES: dict[str, Callable[[Tensor, Tensor], dict[str, float]]] = {
    "accuracy": accuracy,
    "accuracy_and_f1": accuracy_and_f1,
    "correlation": correlation,
}


def click_scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy in percent, area under the ROC curve, and log loss in nats.

    Args:
        logits: Logits of a click.
        labels: 1 for a click, else 0. The area is NaN where all are equal.
    """
    from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

    labels = labels.long()
    has_both = bool((labels != labels[0]).any())
    return {
        "accuracy": 100 * float(accuracy_score(labels, logits > 0)),
        "auc": float(roc_auc_score(labels, logits)) if has_both else float("nan"),
        "log_loss": float(log_loss(labels, logits.double().sigmoid(), labels=[0, 1])),
    }
