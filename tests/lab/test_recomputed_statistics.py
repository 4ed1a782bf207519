import pytest
import torch
from torch import nn

from adahessian.lab.batch_norm import with_statistics_of


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.9), nn.ReLU(), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
    )
    with torch.no_grad():
        for _ in range(3):
            model(5 + torch.randn(6, 2, 4, 4))
    return model


def test_statistics_are_the_mean_over_the_batches_by_their_sizes(model):
    batches = [torch.randn(8, 2, 4, 4), 1 + torch.randn(4, 2, 4, 4)]
    found = with_statistics_of(model, batches)
    means, variances = [], []
    for batch in batches:
        hidden = model[0](batch)
        means.append(hidden.mean((0, 2, 3)))
        variances.append(hidden.var((0, 2, 3)))
    torch.testing.assert_close(found[1].running_mean, (2 * means[0] + means[1]) / 3)
    torch.testing.assert_close(found[1].running_var, (2 * variances[0] + variances[1]) / 3)


def test_all_layers_see_what_the_batch_makes_of_the_ones_before(model):
    # Of one batch, they normalise as training does, but for the variance, which is over one value less.
    batch = torch.randn(50, 2, 8, 8)
    found = with_statistics_of(model, [batch])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    torch.testing.assert_close(found(batch), model(batch), rtol=1e-3, atol=1e-3)


def test_weights_are_the_same_and_the_model_is_left_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    found = with_statistics_of(model, iter([torch.ones(5, 2, 4, 4)]))
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert not any(module.training for module in found.modules())
    assert model[1].momentum == 0.1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for mine, theirs in zip(model.parameters(), found.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()


def test_norms_that_keep_no_statistics_and_models_without_norms():
    batch = torch.randn(9, 3)
    for model in (nn.Linear(3, 2), nn.BatchNorm1d(3, track_running_stats=False)):
        torch.testing.assert_close(with_statistics_of(model, [batch])(batch), model(batch))
