import pytest
import torch

from adahessian.lab.configs.translation import TranslationConfig
from adahessian.lab.data.token_batches import END, PADDING, START
from adahessian.lab.models.transformer import Decoding, Transformer, beam_search
from adahessian.lab.training.random_streams import random_stream

VOCABULARY = 6
WORDS = range(3, VOCABULARY)
LIMITS = [9, 8, 7, 6, 5, 4, 2, 1]


def drawn_logits(source, said):
    """Every start of a sentence has a distribution of its own, so the past of another row is noticed."""
    logits = 1.5 * torch.randn(VOCABULARY, generator=random_stream("logits", source, *said))
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


def search(limits, sources, beam_size, penalty):
    return beam_search(DrawnDecoder(sources), torch.as_tensor(limits), beam_size=beam_size, length_penalty=penalty)


def plain_beam_search(logits_of, limit, beam_size, penalty):
    """The search by its definition, for one sentence, with lists."""
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


@pytest.mark.parametrize("beam_size", [1, 2, 3, 5])
@pytest.mark.parametrize("penalty", [0.6, 1.5])
def test_it_is_the_search_of_its_definition(beam_size, penalty):
    found = search(LIMITS, range(8), beam_size, penalty)
    for source, limit in enumerate(LIMITS):
        logits_of = lambda said, source=source: drawn_logits(source, said)  # noqa: E731
        assert found[source] == plain_beam_search(logits_of, limit, beam_size, penalty)
        assert search([limit], [source], beam_size, penalty) == [found[source]]
    assert len(set(map(len, found))) > 2


@torch.no_grad()
@pytest.mark.parametrize("beam_size", [1, 3])
def test_it_decodes_with_a_transformer(beam_size):
    torch.manual_seed(50)
    model = Transformer(VOCABULARY, TranslationConfig(layers=1, width=16, feed_forward=32, heads=2)).eval()
    source = torch.tensor([[3, 4, 5, END], [5, 5, END, PADDING], [4, END, PADDING, PADDING], [5, 3, 4, END]])
    found = beam_search(Decoding(model, source), torch.full((4,), 9), beam_size=beam_size, length_penalty=1.0)
    for row, sentence in zip(source, found, strict=True):
        logits_of = lambda said, row=row: model(row[None], torch.tensor([said]))[0, -1]  # noqa: E731
        assert sentence == plain_beam_search(logits_of, 9, beam_size, 1.0)
    assert len(set(map(tuple, found))) > 1
