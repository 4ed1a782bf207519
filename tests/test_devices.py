"""Accelerators do what the host does. Without an accelerator there is nothing to run here."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, AdaHessianKron, Curvature, diagnose
from adahessian.algorithm.probes import probe_key, rademacher
from adahessian.cuda_graphs import CannotCapture, CapturedFunction, Memory
from cases import ATTENTION, BATCH_NORM, CONVOLUTION, MLP, flat_parameters, train

ACCELERATORS = [torch.device("cuda")] if torch.cuda.is_available() else []
on_accelerators = pytest.mark.parametrize("device", ACCELERATORS, ids=str)


def to_device(batch, device):
    return tuple(part.to(device) for part in batch)


@on_accelerators
def test_probes_are_those_of_the_host(device):
    key = probe_key(seed=3, measurement=1, probe=4)
    found = rademacher((100_003,), key, 2, dtype=torch.float32, device=device)
    assert torch.equal(found.cpu(), rademacher((100_003,), key, 2, dtype=torch.float32, device=torch.device("cpu")))


@on_accelerators
@pytest.mark.parametrize("kind", [AdaHessian, AdaHessianKron])
def test_optimizers_draw_the_probes_of_the_host(device, kind):
    drawn = []
    for place in (torch.device("cpu"), device):
        params = [torch.ones(shape, device=place, requires_grad=True) for shape in ((7, 3, 3, 3), (300,), (65, 40), ())]
        request = kind(params, seed=3)._begin_measurement()
        drawn.append([probe.cpu() for probe in request.draw(0)])
    torch.testing.assert_close(*drawn, rtol=0, atol=0)


@on_accelerators
@pytest.mark.parametrize("case", [MLP, CONVOLUTION, BATCH_NORM, ATTENTION], ids=str)
@pytest.mark.parametrize("way", ["object", "graph", "closure"])
def test_the_run_is_that_of_the_host(device, case, way):
    for options in (
        {"block_size": 3},
        {"fused": False},
        {"capturable": True},
        {"curvature_every": 3},
        {"averaging": "factored"},
    ):
        finals = []
        for place in (torch.device("cpu"), device):
            model, batch = case.model().to(place), to_device(case.batch(), place)
            optimizer = AdaHessian(model.parameters(), lr=0.01, eps=1e-2, weight_decay=0.1, **options)
            train(case, model, optimizer, batch, 10, way)
            finals.append(flat_parameters(model).cpu())
        torch.testing.assert_close(*finals, rtol=1e-7, atol=1e-9)


@on_accelerators
def test_the_pass_leaves_the_generator_of_the_device_alone(device):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).to(device)
    optimizer = AdaHessian(model.parameters())
    before = torch.cuda.get_rng_state(device)
    assert Curvature(model, lambda m, x: m(x).square().mean(), optimizer).measure(torch.randn(8, 4).to(device))
    assert torch.equal(torch.cuda.get_rng_state(device), before)


@on_accelerators
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    "options", [{}, {"capturable": True}, {"fused": False}, {"block_size": 4}, {"averaging": "factored"}], ids=str
)
def test_neither_an_ordinary_step_nor_a_measurement_waits_for_the_device(device, options):
    param = nn.Parameter(torch.randn(8, 9, device=device))
    optimizer = AdaHessian([param], curvature_every=3, **options)
    curvature = torch.rand_like(param)
    param.grad = torch.randn_like(param)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(7):
            if step in (0, 3, 6):
                optimizer.set_curvature({param: curvature * float("nan") if step == 3 else curvature})
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.warns(UserWarning, match="NaN"):
        assert diagnose(optimizer)["dropped_measurements"] == 1


@on_accelerators
@pytest.mark.parametrize("averaging", ["row", "factored"])
def test_an_ordinary_step_replayed_as_a_graph(device, averaging):
    torch.manual_seed(0)
    start = torch.randn(16, 12, device=device)
    gradients = [torch.randn_like(start) for _ in range(6)]
    curvature = torch.rand_like(start) + 0.5

    def prepared(capturable):
        param = nn.Parameter(start.clone())
        lr = torch.tensor(0.1, device=device) if capturable else 0.1
        options = {"block_size": 4, "averaging": averaging, "curvature_every": 100}
        optimizer = AdaHessian([param], lr=lr, capturable=capturable, **options)
        param.grad = gradients[0].clone()
        optimizer.set_curvature({param: curvature})
        optimizer.step()
        return param, optimizer

    expected, eager = prepared(capturable=False)
    param, optimizer = prepared(capturable=True)
    saved = copy.deepcopy((param.detach(), optimizer.state_dict()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    param.data.copy_(saved[0])
    for key, value in saved[1]["state"][0].items():
        optimizer.state[param][key].copy_(value)
    for gradient in gradients[1:]:
        expected.grad = gradient.clone()
        eager.step()
        param.grad.copy_(gradient)
        graph.replay()
    torch.testing.assert_close(param, expected)


@on_accelerators
def test_an_ordinary_step_of_factors_replayed_as_a_graph(device):
    torch.manual_seed(0)
    start = [torch.randn(*shape, device=device) for shape in ((16, 12), (16, 12), (12,), (3, 16, 12))]
    gradients = [[torch.randn_like(part) for part in start] for _ in range(6)]

    def prepared(capturable):
        params = [nn.Parameter(part.clone()) for part in start]
        lr = torch.tensor(0.1, device=device) if capturable else 0.1
        optimizer = AdaHessianKron(params, lr=lr, capturable=capturable, block_size=8, curvature_every=100)
        set_gradients(params, [part.clone() for part in gradients[0]])
        optimizer._accept(params, None, [[part + 1 for part in start]], gradients[0])
        optimizer.step()
        return params, optimizer

    def set_gradients(params, values):
        for param, value in zip(params, values, strict=True):
            param.grad = value

    expected, eager = prepared(capturable=False)
    params, optimizer = prepared(capturable=True)
    saved = copy.deepcopy((params, optimizer.state_dict()["state"]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    with torch.no_grad():
        for i, param in enumerate(params):
            param.copy_(saved[0][i])
            for key, value in saved[1][i].items():
                optimizer.state[param][key].copy_(value)
    for values in gradients[1:]:
        set_gradients(expected, values)
        eager.step()
        for param, value in zip(params, values, strict=True):
            param.grad.copy_(value)
        graph.replay()
    torch.testing.assert_close(params, expected)


@on_accelerators
def test_a_checkpoint_of_the_host_continues_on_the_device(device):
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, curvature_every=3)
    train(MLP, model, optimizer, batch, 5, "object")
    other = copy.deepcopy(model).to(device)
    resumed = AdaHessian(other.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(MLP, model, optimizer, batch, 5, "object")
    train(MLP, other, resumed, to_device(batch, device), 5, "object")
    torch.testing.assert_close(flat_parameters(other).cpu(), flat_parameters(model), rtol=1e-7, atol=1e-9)


@on_accelerators
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(device, dtype):
    model, batch = MLP.model(dtype).to(device), to_device(MLP.batch(dtype), device)
    before = MLP.loss(model, batch).item()
    train(MLP, model, AdaHessian(model.parameters(), lr=0.01, eps=1e-2), batch, 30, "object")
    assert MLP.loss(model, batch).item() < before


@on_accelerators
def test_recurrent_layers_are_measured_without_cudnn(device):
    diagonals = []
    for place in (torch.device("cpu"), device):
        torch.manual_seed(0)
        model = nn.LSTM(4, 3, dtype=torch.float64).to(place)
        x = torch.randn(5, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(place)
        optimizer = AdaHessian(model.parameters())
        optimizer._accept = lambda params, z, products, gradients: diagonals.append(
            [h.abs().cpu() for h in products[0]]
        )
        assert Curvature(model, lambda model, x: model(x)[0].square().mean(), optimizer).measure(x)
    torch.testing.assert_close(*diagonals)


@on_accelerators
def test_functions_are_captured_side_by_side_also_after_a_capture_that_failed(device):
    places = torch.zeros(6, 1000, device=device)
    memory, model = Memory(), nn.Linear(2, 2).to(device)

    def fail():
        raise ValueError("no")

    add = [partial(place.add_, 1 + i) for i, place in enumerate(places)]
    with pytest.raises(CannotCapture, match="no"):
        CapturedFunction(partial(memory.side_by_side, [*add, fail]), model, memory, rehearse=False)
    assert not places.any()
    graph = CapturedFunction(partial(memory.side_by_side, add), model, memory, rehearse=False)
    for _ in range(3):
        graph.replay()
    assert places.sum(1).tolist() == [3000.0 * (1 + i) for i in range(6)]
