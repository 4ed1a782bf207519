import pytest
import torch
from torch.nn.functional import pad

from adahessian.lab.configs.translation import TranslationConfig
from adahessian.lab.data.token_batches import END, PADDING, START
from adahessian.lab.models.transformer import Decoding, Transformer

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
