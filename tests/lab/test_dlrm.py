import torch
import torch.nn.functional as F

from adahessian.lab.models.dlrm import DLRM


def small(**changes):
    torch.manual_seed(0)
    return DLRM(**{"numbers": 3, "columns": 4, "categories": 5, "width": 2, "bottom": (6,), "top": (7,), **changes})


def examples(count=8):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, generator=generator), torch.randint(5, (count, 4), generator=generator)


def test_it_is_dlrm_with_a_table_for_each_column():
    model = small()
    numbers, categories = examples()
    tables = model.embeddings.weight.split(5)
    of_numbers = model.bottom(numbers)
    rows = [of_numbers, *(F.embedding(categories[:, column], table) for column, table in enumerate(tables))]
    products = [(rows[i] * rows[j]).sum(1) for i in range(5) for j in range(i)]
    expected = model.top(torch.cat([of_numbers, torch.stack(products, 1)], 1)).squeeze(1)
    assert expected.shape == (8,)
    torch.testing.assert_close(model(numbers, categories), expected)


def test_the_layers_are_those_of_the_kaggle_script():
    model = DLRM()
    shapes = [(layer.in_features, layer.out_features) for layer in model.bottom if isinstance(layer, torch.nn.Linear)]
    assert shapes == [(13, 512), (512, 256), (256, 64), (64, 16)]
    shapes = [(layer.in_features, layer.out_features) for layer in model.top if isinstance(layer, torch.nn.Linear)]
    assert shapes == [(16 + 27 * 26 // 2, 512), (512, 256), (256, 1)]
    assert isinstance(model.bottom[-1], torch.nn.ReLU)
    assert isinstance(model.top[-1], torch.nn.Linear)


def test_embeddings_start_within_their_bounds():
    weight = small(categories=400).embeddings.weight
    assert 0.045 < weight.abs().max() <= 0.05


def test_only_the_rows_of_a_batch_have_a_gradient():
    model = small()
    numbers, categories = examples(2)
    model(numbers, categories).sum().backward()
    gradient = model.embeddings.weight.grad
    assert gradient.is_sparse
    rows = {5 * column + row for example in categories.tolist() for column, row in enumerate(example)}
    assert set(gradient.coalesce().indices()[0].tolist()) == rows
