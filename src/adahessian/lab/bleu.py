"""BLEU, as sacrebleu computes it."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from sacrebleu import corpus_bleu

# In this order: a pair of quotation marks is told by the spaces that are left.
_JOINED = (
    (re.compile(r" @-@ "), "-"),
    (re.compile(r" ([.,:;?!%)\]}])"), r"\1"),
    (re.compile(r"([(\[{$]) "), r"\1"),
    (re.compile(r" ('(?:s|m|d|t|re|ve|ll)|n't)\b", re.IGNORECASE), r"\1"),
    (re.compile(r'" ([^"]*) "'), r'"\1"'),
)


def bleu_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenized: bool, lowercase: bool
) -> dict[str, float]:
    """The score on the words of the text, and the one on plain text, in percent.

    ``bleu`` takes text that was split into words as it is, as the paper's script does. ``bleu_detokenized`` first
    undoes that in both texts, and has sacrebleu split them by its own rules ("13a"). Of text that was never split there
    is only the second score, which then goes by both names.

    Args:
        hypotheses: Translations.
        references: The right ones, one for each.
        tokenized: Whether the text has spaces between all words and punctuation, as Moses puts them.
        lowercase: Whether small and capital letters are the same.
    """
    texts, right = list(hypotheses), list(references)
    if not tokenized:
        score = corpus_bleu(texts, [right], tokenize="13a", lowercase=lowercase).score
        return {"bleu": score, "bleu_detokenized": score}
    words = corpus_bleu(texts, [right], tokenize="none", lowercase=lowercase, force=True)
    plain = corpus_bleu(
        [detokenized(text) for text in texts],
        [[detokenized(text) for text in right]],
        tokenize="13a",
        lowercase=lowercase,
    )
    return {"bleu": words.score, "bleu_detokenized": plain.score}


def detokenized(text: str) -> str:
    r"""Text that Moses has split into words, as plain text again, or close to it.

    Example:
        >>> detokenized("well , that &apos;s a so @-@ called &quot; test &quot; .")
        'well, that\'s a so-called "test".'
    """
    text = html.unescape(text)
    for pattern, joined in _JOINED:
        text = pattern.sub(joined, text)
    return text
