"""Numbers to log: compared with the state and with the step that was taken."""

import math
import warnings

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, AdaHessianKron, Curvature, diagnose, param_groups
from adahessian.algorithm.kronecker import condition, rotation_for
from cases import BATCH_NORM, CONVOLUTION, MLP


def stepped(case=MLP, steps=3, named=True, dtype=torch.float32, **options):
    """A model, an optimizer that has taken some steps, and the parameters before the last one."""
    model = case.model(dtype)
    optimizer = AdaHessian(param_groups(model) if named else list(model.parameters()), **options)
    curvature = Curvature(model, case.loss, optimizer)
    batch = case.batch(dtype)
    for _ in range(steps):
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        curvature.measure(batch)
        optimizer.zero_grad()
        case.loss(model, batch).backward()
        optimizer.step()
    return model, optimizer, before


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 3, "lr": 0.01},
        {"hessian_power": 0.5, "eps": 1e-2},
        {"lr": torch.tensor(0.03)},
        {"capturable": True},
        {"maximize": True},
        {"averaging": "factored"},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", [MLP, CONVOLUTION, BATCH_NORM], ids=str)
def test_the_update_is_the_one_that_was_taken(case, options):
    model, optimizer, before = stepped(case, dtype=torch.float64, **options)
    found = diagnose(optimizer, per_parameter=True)
    for name, param in model.named_parameters():
        taken = (param.detach() - before[name]).norm().item()
        assert found[f"update_norm/{name}"] == pytest.approx(taken, rel=1e-3)
        assert found[f"param_norm/{name}"] == pytest.approx(param.norm().item(), rel=1e-5)
        assert found[f"grad_norm/{name}"] == pytest.approx(param.grad.norm().item(), rel=1e-5)
        assert found[f"update_ratio/{name}"] == pytest.approx(taken / param.norm().item(), rel=1e-3)
        assert found[f"unmeasured/{name}"] == 0
        if "hessian_rms" in optimizer.state[param]:
            rms = optimizer.state[param]["hessian_rms"]
            assert found[f"hessian_rms/{name}"] == pytest.approx(rms.square().mean().sqrt().item(), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"averaging": "factored", "eps": 0.03}], ids=str)
def test_the_totals_are_those_of_all_parameters(options):
    model, optimizer, before = stepped(dtype=torch.float64, weight_decay=0.01, **options)
    found = diagnose(optimizer)
    params = list(model.parameters())
    decayed = [(1 - 0.01 * 0.15) * value for value in before.values()]
    taken = (flat(params) - flat(decayed)).norm().item()
    rms = []
    for param in params:
        state = optimizer.state[param]
        if "hessian_row" in state:
            row, column = state["hessian_row"], state["hessian_column"]
            rms.append(row * column / column.square().mean().sqrt())
        else:
            rms.append(state["hessian_rms"])
    expected = {
        "steps": 3,
        "measurements": 3,
        "staleness": 1,
        "dropped_measurements": 0,
        "grad_norm": flat(param.grad for param in params).norm().item(),
        "param_norm": flat(params).norm().item(),
        "update_norm": taken,
        "update_ratio": taken / flat(params).norm().item(),
        "update_rms": taken / 0.15 / flat(params).numel() ** 0.5,
        "at_eps": flat(rms).lt(options.get("eps", 1e-4)).double().mean().item(),
        "unmeasured": 0,
        "hessian_rms": flat(rms).square().mean().sqrt().item(),
    }
    largest = found.pop("update_ratio_max")
    assert found == pytest.approx(expected, rel=1e-3)
    assert all(type(value) is float for value in found.values())
    ratios = [
        value for what, value in diagnose(optimizer, per_parameter=True).items() if what.startswith("update_ratio/")
    ]
    assert largest == ratios[0] == max(ratios)
    assert ratios == sorted(ratios, reverse=True)


def test_weight_decay_compared_with_the_step():
    model, optimizer, before = stepped(MLP, dtype=torch.float64, lr=0.1, weight_decay=0.5)
    found = diagnose(optimizer, per_parameter=True)
    plain = diagnose(stepped(MLP, dtype=torch.float64, lr=0.1)[1], per_parameter=True)
    for name, param in model.named_parameters():
        moved = (param.detach() - (1 - 0.1 * 0.5) * before[name]).norm().item()
        decayed = 0.1 * 0.5 * param.norm().item()
        assert found[f"decay_ratio/{name}"] == pytest.approx(decayed / moved, rel=1e-3)
        assert f"decay_ratio/{name}" not in plain


def test_the_counts():
    found = diagnose(stepped(steps=5, curvature_every=3)[1])
    assert (found["steps"], found["measurements"], found["staleness"]) == (5, 2, 2)


def test_dropped_measurements_are_counted_and_new_ones_warned_of():
    model, optimizer, _ = stepped()
    for times in (1, 2):
        optimizer.set_curvature({param: torch.full_like(param, torch.inf) for param in model.parameters()})
        optimizer.step()
        with pytest.warns(UserWarning, match="NaN"):
            assert diagnose(optimizer)["dropped_measurements"] == times * 4
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            diagnose(optimizer)


def test_blocks_at_the_floor_and_blocks_unmeasured():
    model = nn.Embedding(4, 2)
    optimizer = AdaHessian(model.parameters(), eps=1e-2)
    diagonal = torch.tensor([[1e-3, 1e-3], [1.0, 1e-3], [1.0, 1.0], [0.0, 0.0]])
    gradient = diagonal.clone()  # nothing touched the last row
    optimizer.set_curvature({model.weight: diagonal}, {model.weight: gradient})
    model.weight.grad = gradient
    optimizer.step()
    found = diagnose(optimizer, model, per_parameter=True)
    for name in ("", "/weight"):
        assert found[f"at_eps{name}"] == pytest.approx(3 / 8)
        assert found[f"unmeasured{name}"] == pytest.approx(2 / 8)
        assert found[f"hessian_rms{name}"] == pytest.approx(diagonal[:3].square().mean().sqrt().item())


def test_rows_of_factored_curvature_that_are_unmeasured():
    model = nn.Embedding(4, 2)
    optimizer = AdaHessian(model.parameters(), averaging="factored")
    gradient = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    optimizer.set_curvature({model.weight: gradient}, {model.weight: gradient})
    model.weight.grad = gradient
    optimizer.step()
    found = diagnose(optimizer)
    assert found["unmeasured"] == pytest.approx(1 / 4)
    assert math.isfinite(found["hessian_rms"])
    assert found["update_norm"] > 0


def test_before_the_first_step_there_is_less_to_report():
    model = MLP.model()
    found = diagnose(AdaHessian(param_groups(model)), per_parameter=True)
    assert found["unmeasured"] == found["unmeasured/0.weight"] == 1
    assert found["steps"] == 0
    assert not [name for name in found if name.startswith(("grad_norm", "update", "hessian_rms", "at_eps"))]


def test_where_names_come_from():
    model, optimizer, _ = stepped()
    assert "param_norm/2.bias" in diagnose(optimizer, per_parameter=True)  # from named parameters
    assert "param_norm/0.2.bias" in diagnose(optimizer, nn.Sequential(model), per_parameter=True)
    model, optimizer, _ = stepped(named=False)
    assert "param_norm/group0.3" in diagnose(optimizer, per_parameter=True)
    assert "param_norm/2.bias" in diagnose(optimizer, model, per_parameter=True)
    of_compiled = diagnose(optimizer, torch.compile(model), per_parameter=True)
    assert of_compiled.keys() == diagnose(optimizer, model, per_parameter=True).keys()


def test_a_model_may_be_a_part_of_what_is_optimized():
    model, extra = nn.Linear(2, 2), nn.Parameter(torch.ones(()))
    found = diagnose(AdaHessian([*model.parameters(), extra]), model, per_parameter=True)
    assert {"param_norm/weight", "param_norm/bias", "param_norm/group0.2"} <= found.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype):
    param = nn.Parameter(torch.ones(4, 3, dtype=dtype))
    optimizer = AdaHessian([param], block_size=2)
    (param.abs().square().sum() / 2).backward(create_graph=True)
    optimizer.step()
    found = diagnose(optimizer)
    assert found["grad_norm"] == pytest.approx(12**0.5, rel=1e-2)
    assert found["hessian_rms"] == pytest.approx(1.0, rel=1e-2)
    assert found["update_norm"] == pytest.approx(0.15 * 12**0.5, rel=1e-2)


def test_parameters_without_elements_and_sparse_groups_are_left_out():
    empty, one = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(1))
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = AdaHessian([{"params": [empty, one]}, {"params": table.parameters(), "sparse": True}])
    found = diagnose(optimizer, per_parameter=True)
    assert [what for what in found if "group" in what] == ["param_norm/group0.1", "unmeasured/group0.1"]
    assert found["param_norm"] == 1


def test_the_condition_is_that_of_a_factor_without_padding():
    for shape, kind, block_size in (((10, 7), "kernel", 4), ((8, 4), "kernel", 4), ((3, 5, 4), "stack", 3)):
        rotation = rotation_for(shape, block_size, kind, 1)
        factors = [
            cut.join(torch.eye(cut.size).expand(rotation.members, cut.blocks, -1, -1)) * scale
            for cut, scale in ((rotation.form.rows, 1.0), (rotation.form.columns, 1e6))
        ]
        assert condition(rotation, factors, torch.tensor(0.5)) == {"condition": 1, "damped": 0}
    factors = [torch.eye(2), torch.diag(torch.tensor([4.0, 0, 0, 0]))]
    found = condition(rotation_for((2, 4), 9, "kernel", 1), factors, torch.tensor(1.0))
    assert found == {"condition": 5, "damped": 0.5}


def test_the_condition_has_the_damping_of_the_count_of_measurements():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessianKron(model.parameters())
    curvature = Curvature(model, MLP.loss, optimizer)
    curvature.measure(batch)
    MLP.loss(model, batch).backward()
    optimizer.step()
    of_weights = [optimizer.state[param] for param in model.parameters() if param.dim() > 1]
    factors = [state[key] for state in of_weights for key in ("left_factor", "right_factor")]
    relative = [torch.linalg.eigvalsh(factor) / factor.diagonal().mean() for factor in factors]
    expected = max((each[-1] + 1) / (each[0] + 1) for each in relative)  # the damping is 1 after one measurement
    assert diagnose(optimizer)["condition"] == pytest.approx(expected.item(), rel=1e-5)


def test_nothing_is_changed():
    model, optimizer, _ = stepped()
    before = {name: param.clone() for name, param in model.named_parameters()}
    state = {param: {k: v.clone() for k, v in s.items()} for param, s in optimizer.state.items()}
    diagnose(optimizer)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    for param, of_param in state.items():
        assert all(torch.equal(optimizer.state[param][key], value) for key, value in of_param.items())


def test_bad_input():
    for bad in (None, nn.Linear(2, 2), torch.optim.SGD([torch.ones(1)], 0.1)):
        with pytest.raises(TypeError, match="optimizer"):
            diagnose(bad)
    optimizer = AdaHessian(MLP.model().parameters())
    with pytest.raises(TypeError, match="model"):
        diagnose(optimizer, {"a": 1})
    with pytest.raises(ValueError, match="model"):
        diagnose(optimizer, MLP.model())
