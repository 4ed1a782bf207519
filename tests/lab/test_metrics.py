import math
from dataclasses import replace

import pytest
import torch
from sacrebleu import corpus_bleu
from sacremoses import MosesDetokenizer
from scipy.stats import pearsonr, spearmanr
from torch.nn.functional import one_hot

from adahessian.lab.tasks.glue import glue_scores
from adahessian.lab.tasks.recommendation import click_scores
from adahessian.lab.tasks.translation import CORPORA, bleu

REFERENCES = [
    "So , that &apos;s what we &apos;re doing at the well @-@ known lab .",
    "He said : &quot; I don &apos;t know ( yet ) . &quot;",
    "Two men are waiting for the bus .",
]
HYPOTHESES = [REFERENCES[0].lower().replace("lab", "place"), REFERENCES[1], "Two Men wait for the bus , too ."]


def test_bleu_is_that_of_sacrebleu_on_words_and_on_plain_text():
    detokenize = MosesDetokenizer("en").detokenize
    plain = [[detokenize(text.split()) for text in texts] for texts in (HYPOTHESES, REFERENCES)]
    on_plain_text = corpus_bleu(plain[0], [plain[1]], tokenize="13a").score
    iwslt = CORPORA["iwslt14"]
    for corpus in (iwslt, replace(iwslt, lowercase=False)):
        on_words = corpus_bleu(HYPOTHESES, [REFERENCES], tokenize="none", lowercase=corpus.lowercase, force=True).score
        found = bleu(HYPOTHESES, REFERENCES, corpus)
        assert found["bleu"] == on_words
    assert found["bleu_detokenized"] == on_plain_text != on_words
    assert bleu(*plain, CORPORA["multi30k"]) == {"bleu": on_plain_text, "bleu_detokenized": on_plain_text}


def test_accuracy_and_f1_are_those_of_their_definition():
    labels = torch.tensor([0, 1, 0, 1, 0])
    # One true positive, two false positives and one false negative; and no positives.
    for found, accuracy, f1 in ([0, 1, 1, 0, 1], 40, 40), ([0, 0, 0, 0, 0], 60, 0):
        scores = glue_scores("accuracy_and_f1", one_hot(torch.tensor(found), 2), labels)
        assert scores == pytest.approx({"accuracy": accuracy, "f1": f1, "accuracy_and_f1": (accuracy + f1) / 2})


def test_correlations_are_those_of_scipy():
    found, labels = torch.randn(50, 1), (torch.rand(50) * 6).floor()  # ranks have ties
    pearson, spearman = (100 * each(found.squeeze(1), labels).statistic for each in (pearsonr, spearmanr))
    expected = {"pearson": pearson, "spearman": spearman, "correlation": (pearson + spearman) / 2}
    assert glue_scores("correlation", found, labels) == pytest.approx(expected, rel=1e-5)
    for unusable in (torch.ones(4), torch.tensor([1.0, 2.0, math.nan, 3.0])):
        assert glue_scores("correlation", unusable, torch.arange(4.0))["correlation"] == 0


def test_clicks_are_scored_by_their_definition():
    logits, labels = torch.tensor([-2.0, -1.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    loss = torch.log1p(torch.exp((1 - 2 * labels) * logits)).mean().item()
    # Three of four pairs of a click and another row are in the right order.
    assert click_scores(logits, labels) == pytest.approx({"accuracy": 50, "auc": 0.75, "log_loss": loss})
    for unusable in ((logits, torch.zeros(4)), (logits * math.nan, labels)):
        assert math.isnan(click_scores(*unusable)["auc"])
