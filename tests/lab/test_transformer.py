import pytest
import torch
from torch.nn.functional import pad

from adahessian.lab.configs.translation import TranslationConfig
from adahessian.lab.data.token_batches import END, PADDING, START
from adahessian.lab.models.transformer import Decoding, Transformer, beam_search
from adahessian.lab.training.random_streams import random_stream

VOCABULARY = 20
CONFIG = TranslationConfig(layers=2, width=16, feed_forward=24, heads=2)


@pytest.fixture
def model():
    return Transformer(VOCABULARY, CONFIG).double().eval()


@pytest.fixture
def sentences():
    source, target = torch.randint(3, VOCABULARY, (3, 6)), torch.randint(3, VOCABULARY, (3, 5))
    source[1, 4:], source[2, 2:] = PADDING, PADDING
    target[:, 0], source[:, 1] = START, END
    return source, target


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_later_word_changes_no_earlier_output(model, sentences):
    source, target = sentences
    before = model(source, target)
    for place in range(1, target.shape[1]):
        changed = target.clone()
        changed[:, place] = 3 + (changed[:, place] - 2) % (VOCABULARY - 3)
        after = model(source, changed)
        assert_same(after[:, :place], before[:, :place])
        assert not torch.isclose(after[:, place], before[:, place]).all(-1).any()


def test_every_word_of_the_source_counts_and_padding_does_not(model, sentences):
    source, target = sentences
    before = model(source, target)
    for place in range(source.shape[1]):
        changed = source.clone()
        changed[:, place] = torch.where(source[:, place] == PADDING, PADDING, 3 + (source[:, place] - 2) % 17)
        differs = ~torch.isclose(model(changed, target), before).flatten(1).all(1)
        assert torch.equal(differs, source[:, place] != PADDING)
    assert_same(model(pad(source, (0, 3)), pad(target, (0, 3)))[:, : target.shape[1]], before)
    assert_same(model(source[2:, :2], target[2:]), before[2:])


def test_decoding_step_by_step_gives_the_same_logits(model, sentences):
    source, target = sentences
    decoding = Decoding(model, source)
    steps = torch.stack([decoding.step(target[:, place]) for place in range(target.shape[1])], 1)
    assert_same(steps, model(source, target))


def test_rows_continue_with_the_past_of_other_rows(model, sentences):
    source, target = sentences
    decoding = Decoding(model, source)
    decoding.repeat(2)
    said = target.repeat_interleave(2, 0).clone()
    said[1::2, 1] = 7
    decoding.step(said[:, 0])
    decoding.step(said[:, 1])
    rows = torch.tensor([1, 0, 3, 3, 4, 4])
    decoding.reorder(rows)
    said = torch.cat([said[rows, :2], said[:, 2:]], 1)
    assert_same(decoding.step(said[:, 2]), model(source.repeat_interleave(2, 0), said)[:, 2])


WORDS = range(3, 6)  # of beam search
LIMITS = [9, 8, 7, 6, 5, 4, 2, 1]


def drawn_logits(source, said):
    """Every start of a sentence has a distribution of its own, so the past of another row is noticed."""
    logits = 1.5 * torch.randn(6, generator=random_stream("logits", source, *said))
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
    model = Transformer(6, TranslationConfig(layers=1, width=16, feed_forward=32, heads=2)).eval()
    source = torch.tensor([[3, 4, 5, END], [5, 5, END, PADDING], [4, END, PADDING, PADDING], [5, 3, 4, END]])
    found = beam_search(Decoding(model, source), torch.full((4,), 9), beam_size=beam_size, length_penalty=1.0)
    for row, sentence in zip(source, found, strict=True):
        logits_of = lambda said, row=row: model(row[None], torch.tensor([said]))[0, -1]  # noqa: E731
        assert sentence == plain_beam_search(logits_of, 9, beam_size, 1.0)
    assert len(set(map(tuple, found))) > 1
