"""Numbers to log: against what the state and the step itself say."""

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, Curvature, DenseAndSparse, diagnose, param_groups
from cases import BATCH_NORM, CONVOLUTION, MLP


def stepped(case=MLP, steps=3, named=True, dtype=torch.float32, **settings):
    """A curvature pass whose optimizer has taken some steps; returns the parameters before the last one, too."""
    model = case.model(dtype)
    optimizer = AdaHessian(param_groups(model) if named else list(model.parameters()), **settings)
    curvature = Curvature(model, case.loss, optimizer)
    batch = case.batch(dtype)
    for _ in range(steps):
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        curvature.measure(batch)
        optimizer.zero_grad()
        case.loss(model, batch).backward()
        optimizer.step()
    return curvature, before


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_size": 3, "lr": 0.01},
        {"hessian_power": 0.5, "eps": 1e-2},
        {"lr": torch.tensor(0.03)},
        {"capturable": True},
        {"maximize": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", [MLP, CONVOLUTION, BATCH_NORM], ids=str)
def test_the_update_is_the_one_that_was_taken(case, settings):
    curvature, before = stepped(case, dtype=torch.float64, **settings)
    found = diagnose(curvature)
    for name, param in curvature.model.named_parameters():
        taken = (param.detach() - before[name]).norm().item()
        assert found[f"update_norm/{name}"] == pytest.approx(taken, rel=1e-3)
        assert found[f"param_norm/{name}"] == pytest.approx(param.norm().item(), rel=1e-5)
        assert found[f"grad_norm/{name}"] == pytest.approx(param.grad.norm().item(), rel=1e-5)
        assert found[f"update_ratio/{name}"] == pytest.approx(taken / param.norm().item(), rel=1e-3)
        rms = curvature.optimizer.state[param]["hessian_rms"]
        assert found[f"hessian_rms/{name}"] == pytest.approx(rms.square().mean().sqrt().item(), rel=1e-5)
        assert found[f"unmeasured/{name}"] == 0


def test_what_weight_decay_moves_beside_the_step():
    curvature, before = stepped(MLP, dtype=torch.float64, lr=0.1, weight_decay=0.5)
    found = diagnose(curvature)
    plain = diagnose(stepped(MLP, dtype=torch.float64, lr=0.1)[0])
    for name, param in curvature.model.named_parameters():
        moved = (param.detach() - (1 - 0.1 * 0.5) * before[name]).norm().item()
        decayed = 0.1 * 0.5 * param.norm().item()
        assert found[f"decay_ratio/{name}"] == pytest.approx(decayed / moved, rel=1e-3)
        assert f"decay_ratio/{name}" not in plain


def test_the_counts():
    curvature, _ = stepped(steps=5, update_every=3)
    found = diagnose(curvature)
    assert (found["steps"], found["measurements"], found["staleness"]) == (5, 2, 2)
    assert found["dropped_measurements"] == 0
    assert all(type(value) is float for value in found.values())


def test_dropped_measurements_are_counted_without_a_warning():
    curvature, _ = stepped()
    optimizer = curvature.optimizer
    params = optimizer.measured_parameters()
    optimizer.feed_curvature({param: torch.full_like(param, torch.inf) for param in params})
    optimizer.step()
    assert diagnose(curvature)["dropped_measurements"] == len(params)


def test_blocks_at_the_floor_and_blocks_unmeasured():
    model = nn.Embedding(4, 2)
    optimizer = AdaHessian(model.parameters(), eps=1e-2)
    diagonal = torch.tensor([[1e-3, 1e-3], [1.0, 1e-3], [1.0, 1.0], [0.0, 0.0]])
    gradient = diagonal.clone()  # nothing touched the last row
    optimizer.feed_curvature({model.weight: diagonal}, {model.weight: gradient})
    model.weight.grad = gradient
    optimizer.step()
    found = diagnose(optimizer, model)
    assert found["at_eps/weight"] == pytest.approx(3 / 8)
    assert found["unmeasured/weight"] == pytest.approx(2 / 8)
    assert found["hessian_rms/weight"] == pytest.approx(diagonal[:3].square().mean().sqrt().item())


def test_before_the_first_step_there_is_less_to_tell():
    model = MLP.model()
    found = diagnose(AdaHessian(param_groups(model)))
    assert found["unmeasured/0.weight"] == 1
    assert found["steps"] == 0
    assert not [name for name in found if name.startswith(("grad_norm", "update", "hessian_rms", "at_eps"))]


def test_where_names_come_from():
    curvature, _ = stepped()
    assert "param_norm/2.bias" in diagnose(curvature.optimizer)  # from named parameters
    model = nn.Sequential(curvature.model)
    assert "param_norm/0.2.bias" in diagnose(curvature, model)
    unnamed, _ = stepped(named=False)
    assert "param_norm/group0.3" in diagnose(unnamed.optimizer)
    assert "param_norm/2.bias" in diagnose(unnamed)


def test_a_model_may_be_a_part_of_what_is_optimized():
    model, extra = nn.Linear(2, 2), nn.Parameter(torch.ones(()))
    found = diagnose(AdaHessian([*model.parameters(), extra]), model)
    assert {"param_norm/weight", "param_norm/bias", "param_norm/group0.2"} <= found.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype):
    param = nn.Parameter(torch.ones(4, 3, dtype=dtype))
    optimizer = AdaHessian([param], block_size=2)
    (param.abs().square().sum() / 2).backward(create_graph=True)
    optimizer.step()
    found = diagnose(optimizer)
    assert found["grad_norm/group0.0"] == pytest.approx(12**0.5, rel=1e-2)
    assert found["hessian_rms/group0.0"] == pytest.approx(1.0, rel=1e-2)
    assert found["update_norm/group0.0"] == pytest.approx(0.15 * 12**0.5, rel=1e-2)


def test_parameters_without_elements_are_left_out():
    empty, one = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(1))
    assert "param_norm/group0.0" not in diagnose(AdaHessian([empty, one]))


def test_seconds_come_from_the_curvature_pass():
    curvature, _ = stepped()
    assert diagnose(curvature)["curvature_seconds"] == curvature.seconds > 0
    assert "curvature_seconds" not in diagnose(curvature.optimizer)


def test_nothing_is_changed():
    curvature, _ = stepped()
    before = {name: param.clone() for name, param in curvature.model.named_parameters()}
    state = {param: {k: v.clone() for k, v in s.items()} for param, s in curvature.optimizer.state.items()}
    diagnose(curvature)
    assert all(torch.equal(param, before[name]) for name, param in curvature.model.named_parameters())
    for param, of_param in state.items():
        assert all(torch.equal(curvature.optimizer.state[param][key], value) for key, value in of_param.items())


def test_of_two_optimizers_it_tells_about_the_dense_one():
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 1))
    found = diagnose(DenseAndSparse(model), model)
    assert "param_norm/1.weight" in found
    assert "param_norm/0.weight" not in found


@pytest.mark.parametrize("bad", [None, nn.Linear(2, 2), torch.optim.SGD([torch.ones(1)], 0.1)], ids=type)
def test_bad_input(bad):
    with pytest.raises(TypeError, match="diagnose takes a curvature pass or an AdaHessian"):
        diagnose(bad)


def test_bad_models():
    optimizer = AdaHessian(MLP.model().parameters())
    with pytest.raises(TypeError, match="diagnose takes"):
        diagnose(optimizer, {"a": 1})
    with pytest.raises(ValueError, match="none of the optimizer's parameters"):
        diagnose(optimizer, MLP.model())


def test_the_parameters_of_a_compiled_model_have_the_names_of_its_own():
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = AdaHessian(model.parameters())
    assert diagnose(optimizer, torch.compile(model)).keys() == diagnose(optimizer, model).keys()
