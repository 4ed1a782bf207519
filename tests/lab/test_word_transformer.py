import torch
from torch import nn

from adahessian.lab.configs.language import WordConfig
from adahessian.lab.models import word_transformer as networks

SEGMENT, WIDTH, RANK, WORDS = 5, 8, 3, 11


def in_float64(module):
    module.double()
    for param in module.parameters():
        nn.init.normal_(param)
    return module


def test_multi_linear_attention_is_its_definition():
    attention = in_float64(networks.MultiLinearAttention(SEGMENT, WIDTH, RANK))
    x = torch.randn(2, SEGMENT, WIDTH, dtype=torch.float64)
    query, key, value = attention.qkv(x).chunk(3, -1)
    places = attention.positions(attention.sinusoids)
    expected = torch.zeros(2, SEGMENT, SEGMENT, SEGMENT, dtype=torch.float64)
    for i in range(SEGMENT):
        for j in range(i + 1):
            for k in range(i + 1):
                terms = attention.core * query[:, i] * (key[:, j] + places[i, j]) * value[:, k]
                expected[:, i, j, k] = terms.sum(1)
    torch.testing.assert_close(attention(x), attention.out(expected.flatten(2)))


def test_outputs_are_log_probabilities_and_causal():
    config = WordConfig(layers=2, width=WIDTH, feed_forward=13, head_width=RANK, segment=SEGMENT)
    model = in_float64(networks.WordTransformer(WORDS, config)).eval()
    assert model.words.weight is model.softmax.weight
    words = torch.randint(WORDS, (3, SEGMENT))
    each = torch.stack([model(words, torch.full_like(words, word))[0] for word in range(WORDS)])
    torch.testing.assert_close(each.exp().sum(0), torch.ones(3, SEGMENT, dtype=torch.float64))
    torch.testing.assert_close(model(words, words)[1], each.mean(0))
    before, _ = model(words, words)
    for place in range(SEGMENT):
        changed = words.clone()
        changed[:, place] = (changed[:, place] + 1) % WORDS
        after, _ = model(changed, words)
        assert torch.equal(after[:, :place], before[:, :place])
        assert (after[:, place:] != before[:, place:]).all()


def test_the_adaptive_softmax_is_that_of_torch():
    softmax = in_float64(networks.AdaptiveSoftmax(64, 40, [10, 15, 30]))
    x = torch.randn(3, 40, 64, dtype=torch.float64)
    targets = torch.stack([torch.randperm(40) for _ in range(3)])
    log_prob, over_words = softmax(x, targets)
    expected = nn.AdaptiveLogSoftmaxWithLoss.log_prob(softmax, x.flatten(0, 1)).view(3, 40, 40)
    torch.testing.assert_close(log_prob, expected.gather(-1, targets[..., None]).squeeze(-1))
    torch.testing.assert_close(over_words, expected.mean(-1))
