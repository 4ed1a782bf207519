import itertools

import pytest
import torch

from adahessian.lab.beam_search import beam_search
from adahessian.lab.data.token_batches import END, PADDING, START
from adahessian.lab.models.transformer import Decoding, Transformer
from adahessian.lab.randomness import generator_for

VOCABULARY = 6
WORDS = range(3, VOCABULARY)
SOURCES = range(8)


def drawn_logits(source, said):
    """Every beginning of a sentence has a distribution of its own: whoever takes another one is found out."""
    logits = 1.5 * torch.randn(VOCABULARY, generator=generator_for("logits", source, *said))
    logits[END] -= 1
    return logits


class DrawnDecoder:
    def __init__(self, sources):
        self.rows = [(source, ()) for source in sources]

    def repeat(self, times):
        self.rows = [row for row in self.rows for _ in range(times)]

    def reorder(self, rows):
        self.rows = [self.rows[row] for row in rows.tolist()]

    def step(self, tokens):
        self.rows = [(source, (*said, token)) for (source, said), token in zip(self.rows, tokens.tolist(), strict=True)]
        return torch.stack([drawn_logits(*row) for row in self.rows])


def search(limits, *, sources=SOURCES, beam_size, length_penalty=1.0):
    return beam_search(
        DrawnDecoder(sources), torch.as_tensor(limits), beam_size=beam_size, length_penalty=length_penalty
    )


def all_scores(source, limit, penalty):
    """Of every sentence there is."""
    for length in range(limit):
        for words in itertools.product(WORDS, repeat=length):
            sentence = (*words, END)
            logs = [drawn_logits(source, (START, *sentence[:place])).log_softmax(-1) for place in range(length + 1)]
            total = sum(log[token].item() for log, token in zip(logs, sentence, strict=True))
            yield total / len(sentence) ** penalty, list(words)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
def test_a_beam_that_holds_all_sentences_finds_the_best(penalty):
    limits = [4, 4, 3, 1]
    found, scores = search(limits, sources=range(4), beam_size=50, length_penalty=penalty)
    for source, limit in enumerate(limits):
        score, sentence = max(all_scores(source, limit, penalty))
        assert found[source] == sentence
        assert scores[source] == pytest.approx(score, abs=1e-5)


def test_the_length_penalty_matters():
    lengths = [sum(map(len, search([6] * 8, beam_size=4, length_penalty=penalty)[0])) for penalty in (0.0, 1.0, 2.0)]
    assert lengths[0] < lengths[1] < lengths[2]


def greedy(source, limit):
    said = [START]
    while len(said) < limit:
        logits = drawn_logits(source, said)
        logits[[PADDING, START]] = -torch.inf
        token = int(logits.argmax())
        if token == END:
            break
        said.append(token)
    return said[1:]


def test_a_beam_of_one_is_greedy():
    limits = [9, 9, 9, 9, 9, 5, 2, 1]
    found, _ = search(limits, beam_size=1)
    assert found == [greedy(source, limit) for source, limit in enumerate(limits)]
    assert len(set(map(len, found))) > 3


def plain_beam_search(logits_of, limit, beam_size, penalty):
    """The search as it is told, of one sentence, with lists."""
    beam, ended = [(0.0, [START])], []
    for length in range(1, limit + 1):
        candidates = []
        for score, said in beam:
            logs = logits_of(said).log_softmax(-1)
            tokens = [END] if length == limit else [END, *WORDS]
            candidates += [(score + logs[token].item(), [*said, token]) for token in tokens]
        candidates.sort(key=lambda candidate: -candidate[0])
        ended += [(score / length**penalty, said) for score, said in candidates[:beam_size] if said[-1] == END]
        if len(ended) >= beam_size:
            break
        beam = [candidate for candidate in candidates if candidate[1][-1] != END][:beam_size]
    return max(ended)[1][1:-1]


@pytest.mark.parametrize("beam_size", [2, 3, 5])
@pytest.mark.parametrize("penalty", [0.6, 1.5])
def test_a_narrow_beam_keeps_what_it_should(beam_size, penalty):
    limits = [9, 8, 7, 6, 5, 4, 3, 9]
    found, _ = search(limits, beam_size=beam_size, length_penalty=penalty)
    assert found == [
        plain_beam_search(lambda said, source=source: drawn_logits(source, said), limit, beam_size, penalty)
        for source, limit in enumerate(limits)
    ]


def test_neighbours_in_the_batch_change_nothing():
    limits = [9, 8, 7, 6, 5, 4, 3, 9]
    together, scores = search(limits, beam_size=3)
    for source, limit in enumerate(limits):
        alone, score = search([limit], sources=[source], beam_size=3)
        assert alone == [together[source]]
        assert score == pytest.approx([scores[source]], abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("beam_size", [1, 3])
def test_with_a_transformer(beam_size):
    torch.manual_seed(50)
    model = Transformer(VOCABULARY, layers=1, width=16, feed_forward=32, heads=2).eval()
    source = torch.tensor([[3, 4, 5, END], [5, 5, END, PADDING], [4, END, PADDING, PADDING], [5, 3, 4, END]])
    found, _ = beam_search(Decoding(model, source), torch.full((4,), 9), beam_size=beam_size, length_penalty=1.0)

    def expected(row):
        return plain_beam_search(lambda said: model(row.unsqueeze(0), torch.tensor([said]))[0, -1], 9, beam_size, 1.0)

    assert found == [expected(row) for row in source]
    assert len(set(map(tuple, found))) > 1
