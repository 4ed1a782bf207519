"""Beam search: the most probable sentence of a decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from adahessian.lab.data.token_batches import END, PADDING, START
from adahessian.lab.models.transformer import Decoding


def beam_search(
    decoder: Decoding, limits: Tensor, *, beam_size: int, length_penalty: float
) -> tuple[list[list[int]], list[float]]:
    r"""Return the best sentence for each source, without its end, and its score.

    The score of a sentence of the tokens :math:`y_1, \dots, y_n`, of which the last is the end, is

    .. math::
        \frac{1}{n^p} \sum_{i = 1}^{n} \log P(y_i \mid y_1, \dots, y_{i - 1})

    with the length penalty p. The search for a source stops when ``beam_size`` of its sentences have ended. ``limits``
    holds the longest sentence for each source, including its end.
    """
    sources, device = len(limits), limits.device
    decoder.repeat(beam_size)
    first_rows = (torch.arange(sources, device=device) * beam_size).unsqueeze(1)
    ranks = torch.arange(2 * beam_size, device=device)
    said = torch.full((sources * beam_size, 1), START, device=device)
    # All rows of a beam start alike, so only the first one counts.
    scores = torch.full((sources, beam_size), -torch.inf, device=device)
    scores[:, 0] = 0
    best_scores = torch.full((sources,), -torch.inf, device=device)
    best = torch.full((sources, int(limits.max()) + 1), PADDING, device=device)
    ended = torch.zeros(sources, dtype=torch.long, device=device)

    for length in range(1, best.shape[1]):
        logs = decoder.step(said[:, -1]).float().log_softmax(-1)
        logs[:, [PADDING, START]] = -torch.inf
        at_limit = (limits <= length).repeat_interleave(beam_size)
        words = torch.arange(logs.shape[1], device=device) != END
        logs = logs.masked_fill(at_limit.unsqueeze(1) & words, -torch.inf)

        # A row has one way to end, so half of the candidates at most are ends.
        candidates = (scores.unsqueeze(2) + logs.unflatten(0, (sources, beam_size))).flatten(1)
        scores, picked = candidates.topk(min(2 * beam_size, candidates.shape[1]), dim=1)
        rows, tokens = first_rows + picked // logs.shape[1], picked % logs.shape[1]

        ends = tokens == END
        # An end counts only among the best of the beam, as a word does.
        counted = ends & (ranks[: ends.shape[1]] < beam_size) & (scores > -torch.inf) & (ended < beam_size).unsqueeze(1)
        found, place = (scores / length**length_penalty).masked_fill(~counted, -torch.inf).max(1)
        better = found > best_scores
        best_scores = torch.where(better, found, best_scores)
        sentence = torch.full_like(best, PADDING)
        sentence[:, :length] = said[rows.gather(1, place.unsqueeze(1)).squeeze(1)]
        best = torch.where(better.unsqueeze(1), sentence, best)
        ended += counted.sum(1)
        if bool(((ended >= beam_size) | (limits <= length)).all()):
            break

        scores, kept = scores.masked_fill(ends, -torch.inf).topk(beam_size, dim=1)
        rows = rows.gather(1, kept).flatten()
        said = torch.cat([said[rows], tokens.gather(1, kept).flatten().unsqueeze(1)], 1)
        decoder.reorder(rows)
    sentences = [[token for token in row if token not in (PADDING, START)] for row in best.tolist()]
    return sentences, best_scores.tolist()
