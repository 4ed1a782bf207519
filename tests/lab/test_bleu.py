import math
from collections import Counter

import pytest
from sacrebleu import corpus_bleu
from sacrebleu.metrics import BLEU

from adahessian.lab.bleu import bleu_scores, detokenized

REFERENCES = [
    "So , that &apos;s what we &apos;re doing at the well @-@ known lab .",
    "He said : &quot; I don &apos;t know ( yet ) . &quot;",
    "Two men are waiting for the bus .",
]
HYPOTHESES = [
    "so , that &apos;s what we are doing at the well @-@ known place .",
    "He said : &quot; I don &apos;t know ( yet ) . &quot;",
    "Two Men wait for the bus , too .",
]


def multi_bleu(hypotheses, references):
    """BLEU as it is defined, on words between spaces."""
    right, total = Counter(), Counter()
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        words, expected = hypothesis.split(), reference.split()
        for n in range(1, 5):
            said = Counter(zip(*(words[k:] for k in range(n)), strict=False))
            there = Counter(zip(*(expected[k:] for k in range(n)), strict=False))
            right[n] += (said & there).total()
            total[n] += said.total()
    lengths = [sum(len(text.split()) for text in texts) for texts in (hypotheses, references)]
    brevity = min(1, math.exp(1 - lengths[1] / lengths[0]))
    return 100 * brevity * math.exp(sum(math.log(right[n] / total[n]) for n in range(1, 5)) / 4)


def lower(texts):
    return [text.lower() for text in texts]


def test_of_words_it_is_multi_bleu_and_sacrebleu_s_without_splitting():
    with_case = bleu_scores(HYPOTHESES, REFERENCES, tokenized=True, lowercase=False)
    without = bleu_scores(HYPOTHESES, REFERENCES, tokenized=True, lowercase=True)
    assert with_case["bleu"] == pytest.approx(multi_bleu(HYPOTHESES, REFERENCES))
    assert without["bleu"] == pytest.approx(multi_bleu(lower(HYPOTHESES), lower(REFERENCES)))
    assert with_case["bleu"] < without["bleu"]
    assert with_case["bleu"] == BLEU(tokenize="none", force=True).corpus_score(HYPOTHESES, [REFERENCES]).score


def test_of_plain_text_it_is_sacrebleu_s():
    plain = [[detokenized(text) for text in texts] for texts in (HYPOTHESES, REFERENCES)]
    scores = bleu_scores(HYPOTHESES, REFERENCES, tokenized=True, lowercase=False)
    assert scores["bleu_detokenized"] == corpus_bleu(plain[0], [plain[1]], tokenize="13a").score
    assert scores["bleu_detokenized"] != scores["bleu"]
    never_split = bleu_scores(*plain, tokenized=False, lowercase=False)
    assert never_split == dict.fromkeys(("bleu", "bleu_detokenized"), scores["bleu_detokenized"])


def test_words_are_put_together_again():
    assert [detokenized(text) for text in REFERENCES] == [
        "So, that's what we're doing at the well-known lab.",
        'He said: "I don\'t know (yet)."',
        "Two men are waiting for the bus.",
    ]


def test_what_says_nothing_has_no_score():
    assert bleu_scores(["", ""], REFERENCES[:2], tokenized=True, lowercase=False)["bleu"] == 0
