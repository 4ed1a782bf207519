"""Small models: ResNets, DLRM, GPT, and networks with derivatives."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import hessian, jacrev, vmap

from adahessian.lab.configs.recommendation import ClickConfig
from adahessian.lab.configs.translation import TranslationConfig
from adahessian.lab.models.gpt import GPT
from adahessian.lab.models.resnet import ResNet, ResNet18
from adahessian.lab.models.transformer import Transformer
from adahessian.lab.tasks.recommendation import DLRM
from adahessian.lab.tasks.science import LaplacianMLP


def test_networks_have_their_published_sizes():
    for model, size in (
        (ResNet(20), 269_722),
        (ResNet(32), 464_154),
        (ResNet18(), 11_689_512),
        (DLRM(ClickConfig(hash_size=999)), 891_985),
        (Transformer(100, TranslationConfig()), 31_596_544),
    ):
        assert sum(param.numel() for param in model.parameters()) == size


@pytest.mark.parametrize(("size", "small", "expected"), [(224, False, 56), (64, True, 64)])
def test_resnet18_reduces_large_images_first(size, small, expected):
    model, image = ResNet18(7, small_images=small, width=4), torch.randn(1, 3, size, size)
    assert model.pool(model.conv(image)).shape == (1, 4, expected, expected)
    assert model(image).shape == (1, 7)


def test_the_first_logits_of_resnet20_are_close_together():
    """Else some classes are all but certain, with next to no curvature for the first step to divide by."""
    assert ResNet(20)(torch.randn(64, 3, 32, 32)).std(1).max() < 1.5


def test_dlrm_has_a_table_per_column_with_sparse_gradients():
    model = DLRM(ClickConfig(hash_size=4, embedding_width=2, bottom_layers=(6,), top_layers=(7,)))
    numbers, categories = torch.rand(2, 13), torch.randint(5, (2, 26))
    dense = model.bottom(numbers)
    tables = model.embeddings.weight.split(5)
    rows = [dense, *(F.embedding(categories[:, column], table) for column, table in enumerate(tables))]
    products = [(rows[i] * rows[j]).sum(1) for i in range(27) for j in range(i)]
    expected = model.top(torch.cat([dense, torch.stack(products, 1)], 1)).squeeze(1)
    logits = model(numbers, categories)
    torch.testing.assert_close(logits, expected)
    logits.sum().backward()
    touched = {5 * column + row for example in categories.tolist() for column, row in enumerate(example)}
    assert {*model.embeddings.weight.grad.coalesce().indices()[0].tolist()} == touched


def test_a_later_token_changes_no_earlier_output_of_a_gpt():
    model = GPT(layers=2, width=16, heads=2, vocabulary=11, context=6).double()
    tokens = torch.randint(11, (3, 6))
    before = model(tokens)
    for place in range(6):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        after = model(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-12)
        assert not torch.isclose(after[:, place:], before[:, place:]).all(-1).any()


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_derivatives_with_respect_to_inputs_are_those_of_autograd(dimensions):
    model = LaplacianMLP(dimensions, 7, 3).double()
    for layer in model.layers:
        torch.nn.init.normal_(layer.bias)
    points = torch.randn(5, dimensions, dtype=torch.float64)
    values, gradients, laplacians = model(points)

    def network(x):
        for layer in model.layers[:-1]:
            x = layer(x).tanh()
        return model.layers[-1](x).squeeze(0)

    torch.testing.assert_close(values, vmap(network)(points))
    torch.testing.assert_close(gradients, vmap(jacrev(network))(points).T)
    torch.testing.assert_close(laplacians, vmap(hessian(network))(points).diagonal(dim1=1, dim2=2).sum(1))
