import pytest
import torch

from adahessian.lab.data.token_batches import END, PADDING, START
from adahessian.lab.models.transformer import Decoding, Transformer, sinusoids

VOCABULARY = 20


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(VOCABULARY, layers=2, width=16, feed_forward=24, heads=2).double()


@pytest.fixture
def sentences():
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(3, VOCABULARY, (3, 6), generator=generator)
    target = torch.randint(3, VOCABULARY, (3, 5), generator=generator)
    source[1, 4:], source[2, 2:] = PADDING, PADDING
    target[:, 0], source[:, 1] = START, END
    return source, target


def test_shapes_and_one_matrix_for_all_embeddings(model, sentences):
    assert model(*sentences).shape == (3, 5, VOCABULARY)
    assert [name for name, param in model.named_parameters() if VOCABULARY in param.shape] == ["tokens.weight"]


def test_a_layer_of_the_paper_s_model_has_its_size():
    attention, feed_forward, norm = 4 * (512 * 512 + 512), 512 * 1024 + 1024 + 1024 * 512 + 512, 2 * 512
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    model = Transformer(VOCABULARY, layers=1)
    assert sum(param.numel() for param in model.parameters()) == VOCABULARY * 512 + encoder + decoder + 2 * norm


def test_a_later_word_changes_no_earlier_output(model, sentences):
    model.eval()
    source, target = sentences
    before = model(source, target)
    for place in range(1, target.shape[1]):
        changed = target.clone()
        changed[:, place] = 3 + (changed[:, place] - 2) % (VOCABULARY - 3)
        after = model(source, changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-12)
        assert not torch.isclose(after[:, place], before[:, place]).all(-1).any()


def test_every_word_of_the_source_counts(model, sentences):
    model.eval()
    source, target = sentences
    before = model(source, target)
    for place in range(source.shape[1]):
        changed = source.clone()
        changed[:, place] = torch.where(source[:, place] == PADDING, PADDING, 3 + (source[:, place] - 2) % 17)
        differs = ~torch.isclose(model(changed, target), before).flatten(1).all(1)
        assert torch.equal(differs, source[:, place] != PADDING)


def test_padding_changes_nothing(model, sentences):
    model.eval()
    source, target = sentences
    whole = model(source, target)
    padded = model(torch.nn.functional.pad(source, (0, 3)), torch.nn.functional.pad(target, (0, 3)))
    torch.testing.assert_close(padded[:, : target.shape[1]], whole, rtol=0, atol=1e-12)
    alone = model(source[2:, :2], target[2:])
    torch.testing.assert_close(alone, whole[2:], rtol=0, atol=1e-12)


def test_step_by_step_is_all_at_once(model, sentences):
    model.eval()
    source, target = sentences
    decoding = Decoding(model, source)
    steps = torch.stack([decoding.step(target[:, place]) for place in range(target.shape[1])], 1)
    torch.testing.assert_close(steps, model(source, target), rtol=0, atol=1e-12)


def test_rows_go_on_with_the_past_of_others(model, sentences):
    model.eval()
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
    expected = model(source.repeat_interleave(2, 0), said)[:, 2]
    torch.testing.assert_close(decoding.step(said[:, 2]), expected, rtol=0, atol=1e-12)


def test_places_are_told_apart_and_go_on_where_they_were():
    whole = sinusoids(0, 300, torch.zeros(1, 32))
    assert whole.shape == (300, 32)
    assert torch.cdist(whole, whole).add(torch.eye(300)).min() > 0.1
    assert torch.equal(sinusoids(7, 2, torch.zeros(1, 32)), whole[7:9])


def test_each_dropout_is_its_own(sentences):
    torch.manual_seed(0)
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        none = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
        model = Transformer(VOCABULARY, layers=1, width=16, feed_forward=24, heads=2, **{**none, name: 0.5})
        assert not torch.equal(model(*sentences), model(*sentences))
        model.eval()
        assert torch.equal(model(*sentences), model(*sentences))
        still = Transformer(VOCABULARY, layers=1, width=16, feed_forward=24, heads=2, **none)
        assert torch.equal(still(*sentences), still(*sentences))


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="Invalid width: 20"):
        Transformer(VOCABULARY, width=20, heads=4)
