import pytest
import torch
from torch import nn

from adahessian.lab.models.adaptive_softmax import AdaptiveSoftmax
from adahessian.lab.models.tensorized import MultiLinearAttention
from adahessian.lab.models.word_transformer import FullSoftmax, RelativePositions, SoftmaxAttention, WordTransformer

SEGMENT, WIDTH, RANK, WORDS = 5, 8, 3, 11
ATTENTIONS = {
    "tensorized": lambda: MultiLinearAttention(SEGMENT, WIDTH, RANK),
    "ordinary": lambda: SoftmaxAttention(SEGMENT, WIDTH, RANK, 2),
}


def in_float64(module):
    module.double()
    for param in module.parameters():
        nn.init.normal_(param)
    return module


def make_model(attention, softmax=None):
    return in_float64(
        WordTransformer(
            layers=2,
            width=WIDTH,
            feed_forward=13,
            vocabulary=WORDS,
            dropout=0.3,
            make_attention=ATTENTIONS[attention],
            softmax=softmax or FullSoftmax(WIDTH, WORDS),
        )
    ).eval()


def test_multi_linear_attention_is_its_definition():
    torch.manual_seed(0)
    attention = in_float64(MultiLinearAttention(SEGMENT, WIDTH, RANK))
    x = torch.randn(2, SEGMENT, WIDTH, dtype=torch.float64)
    query, key, value = attention.qkv(x).chunk(3, -1)
    places = attention.positions()
    expected = torch.zeros(2, SEGMENT, SEGMENT, SEGMENT, dtype=torch.float64)
    for b in range(2):
        for i in range(SEGMENT):
            for j in range(i + 1):
                for k in range(i + 1):
                    expected[b, i, j, k] = sum(
                        attention.core[r] * query[b, i, r] * (key[b, j, r] + places[i, j, r]) * value[b, k, r]
                        for r in range(RANK)
                    )
    torch.testing.assert_close(attention(x), attention.out(expected.flatten(2)))


def test_ordinary_attention_is_its_definition():
    torch.manual_seed(0)
    attention = in_float64(SoftmaxAttention(SEGMENT, WIDTH, RANK, 2))
    x = torch.randn(1, SEGMENT, WIDTH, dtype=torch.float64)
    query, key, value = attention.qkv(x).view(SEGMENT, 3, 2, RANK).unbind(1)
    places = attention.positions().view(SEGMENT, SEGMENT, 2, RANK)
    rows = []
    for i in range(SEGMENT):
        heads = []
        for h in range(2):
            scores = torch.stack([query[i, h] @ (key[j, h] + places[i, j, h]) for j in range(i + 1)]) / RANK**0.5
            heads.append(scores.softmax(0) @ value[: i + 1, h])
        rows.append(torch.cat(heads))
    torch.testing.assert_close(attention(x)[0], attention.out(torch.stack(rows)))


def test_positions_depend_on_the_distance_alone():
    places = RelativePositions(SEGMENT, WIDTH, RANK)()
    for distance in range(SEGMENT):
        diagonal = places.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal))
    assert not torch.allclose(places[1, 0], places[2, 0])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_word_sees_a_later_one(attention):
    torch.manual_seed(0)
    model = make_model(attention)
    words, targets = torch.randint(WORDS, (2, 3, SEGMENT))
    before, _ = model(words, targets)
    for place in range(SEGMENT):
        changed = words.clone()
        changed[:, place] = (changed[:, place] + 1) % WORDS
        after, _ = model(changed, targets)
        assert torch.equal(after[:, :place], before[:, :place])
        assert (after[:, place:] != before[:, place:]).all()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_log_probabilities_are_of_a_distribution(attention):
    torch.manual_seed(0)
    model = make_model(attention)
    words = torch.randint(WORDS, (3, SEGMENT))
    each = torch.stack([model(words, torch.full_like(words, word))[0] for word in range(WORDS)])
    torch.testing.assert_close(each.exp().sum(0), torch.ones(3, SEGMENT, dtype=torch.float64))
    torch.testing.assert_close(model(words, words)[1], each.mean(0))


def test_the_adaptive_softmax_is_torchs():
    torch.manual_seed(0)
    softmax = in_float64(AdaptiveSoftmax(64, 40, [10, 15, 30]))
    x = torch.randn(3, 40, 64, dtype=torch.float64)
    targets = torch.stack([torch.randperm(40) for _ in range(3)])
    log_prob, over_words = softmax(x, targets)
    expected = nn.AdaptiveLogSoftmaxWithLoss.log_prob(softmax, x.flatten(0, 1)).view(3, 40, 40)
    torch.testing.assert_close(log_prob, expected.gather(-1, targets[..., None]).squeeze(-1))
    torch.testing.assert_close(over_words, expected.mean(-1))
    picked = nn.AdaptiveLogSoftmaxWithLoss.forward(softmax, x.flatten(0, 1), targets.flatten()).output
    torch.testing.assert_close(log_prob.flatten(), picked)


def test_the_embeddings_are_tied_to_a_full_softmax():
    model = make_model("tensorized")
    assert model.words.weight is model.softmax.weight
    model = make_model("tensorized", AdaptiveSoftmax(WIDTH, WORDS, [4]))
    assert sum(param.shape == (WORDS, WIDTH) for param in model.parameters()) == 1


def test_the_size_of_the_network_on_penn_treebank():
    model = WordTransformer(
        layers=3,
        width=256,
        feed_forward=2100,
        vocabulary=10_000,
        dropout=0.3,
        make_attention=lambda: MultiLinearAttention(32, 256, 40),
        softmax=FullSoftmax(256, 10_000),
    )
    attention = 4 * 256 * 40 + 40 + 32 * 32 * 256
    feed_forward = 2 * 256 * 2100 + 2100 + 256
    norms = 2 * 2 * 256
    layers = 3 * (attention + feed_forward + norms)
    assert sum(param.numel() for param in model.parameters()) == 10_000 * 256 + 10_000 + layers == 6_715_172
