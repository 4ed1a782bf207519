"""Every mode of the engine trains as the plain loop does: on batch norm, attention and a recurrent layer."""

import gc

import pytest
import torch
from torch import Tensor, nn

from adahessian import AdaHessian, CapturedStep, Curvature, CurvatureError, captured
from cases import ATTENTION, BATCH_NORM, RECURRENT, REGRESSION, Case

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
CASES = [BATCH_NORM, ATTENTION, RECURRENT]
STEPS = 20


@pytest.fixture(autouse=True)
def float32_proper():
    """On a GPU convolutions take tf32 by default: then no two ways agree to float32's digits."""
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=cudnn.enabled, allow_tf32=False):
        yield


def on(device: str, case: Case) -> tuple[nn.Module, tuple[Tensor, Tensor], AdaHessian]:
    model = case.model(torch.float32).to(device)
    x, y = case.batch(torch.float32)
    optimizer = AdaHessian(model.parameters(), lr=0.05, eps=1e-2, update_every=3, num_probes=2, block_size=2)
    return model, (x.to(device), y.to(device)), optimizer


def all_values(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in (*model.parameters(), *model.buffers())]


def by_loop(device: str, case: Case, **settings) -> list[Tensor]:
    model, batch, optimizer = on(device, case)
    curvature = Curvature(model, case.loss, optimizer, **settings)
    for _ in range(STEPS):
        curvature.measure(batch)
        optimizer.zero_grad()
        case.loss(model, batch).backward()
        optimizer.step()
    assert_as_asked(curvature, case, batch, settings)
    return all_values(model)


def assert_as_asked(curvature: Curvature, case: Case, batch: object, settings: dict[str, object]) -> None:
    """What was to be compiled is: a fallback would pass every comparison. Torch compiles no recurrent layer."""
    if settings.get("compile") and case is not RECURRENT:
        assert curvature.engine.choice(batch).is_compiled


def by_step(device: str, case: Case, *, capture: bool, **settings) -> list[Tensor]:
    model, batch, optimizer = on(device, case)
    curvature = Curvature(model, case.loss, optimizer, **settings)
    step = CapturedStep(curvature, capture=capture)
    for _ in range(STEPS):
        step(batch)
    assert_as_asked(curvature, case, batch, settings)
    return all_values(model)


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
class TestModes:
    @pytest.mark.parametrize("fraction", [1.0, 0.5])
    def test_one_step_object_uncompiled(self, device, case, fraction):
        found = by_step(device, case, capture=False, compile=False, batch_fraction=fraction)
        assert_alike(found, by_loop(device, case, compile=False, batch_fraction=fraction))

    def test_forward_over_reverse(self, device, case):
        if device == "cuda" and case is RECURRENT:
            with pytest.raises(CurvatureError, match="forward AD"):
                by_loop(device, case, product="forward_over_reverse", compile=False)
            return
        found = by_loop(device, case, product="forward_over_reverse", compile=False)
        assert_alike(found, by_loop(device, case, compile=False))

    def test_compiled_loop(self, device, case):
        found = by_loop(device, case, compile=True, batch_fraction=0.5)
        assert_alike(found, by_loop(device, case, compile=False, batch_fraction=0.5))

    @pytest.mark.parametrize("product", ["auto", "double_backward"])
    def test_compiled_step(self, device, case, product):
        found = by_step(device, case, capture=False, compile=True, product=product)
        assert_alike(found, by_loop(device, case, compile=False))


@pytest.mark.parametrize("device", DEVICES)
def test_zero_tangents_without_memory(device):
    """The mean square error's derivatives have some, at whose address compiled code must not look."""
    found = by_step(device, REGRESSION, capture=False, compile=True, product="forward_over_reverse")
    assert_alike(found, by_loop(device, REGRESSION, compile=False))


@pytest.mark.parametrize("device", [device for device in DEVICES if device == "cuda"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_step(device, case, fraction, compiled):
    found = by_step(device, case, capture=True, compile=compiled, batch_fraction=fraction)
    assert_alike(found, by_loop(device, case, compile=False, batch_fraction=fraction))


@pytest.mark.parametrize("device", [device for device in DEVICES if device == "cuda"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_graphs_in_the_same_memory(device, fraction, monkeypatch):
    """Batches of two sizes: four graphs, in any order."""
    monkeypatch.setattr(captured, "_SMALL", -1)

    def train(make_step) -> list[Tensor]:
        model, (x, y), optimizer = on(device, BATCH_NORM)
        step = make_step(Curvature(model, BATCH_NORM.loss, optimizer, compile=False, batch_fraction=fraction))
        for number in range(40):
            size = len(x) if number % 2 else 6
            step((x[:size], y[:size]))
        return all_values(model)

    def plain(curvature):
        def step(batch):
            curvature.measure(batch)
            curvature.optimizer.zero_grad()
            BATCH_NORM.loss(curvature.model, batch).backward()
            curvature.optimizer.step()

        return step

    assert_alike(train(CapturedStep), train(plain))


@pytest.mark.parametrize("device", [device for device in DEVICES if device == "cuda"])
def test_a_capture_that_fails_leaves_graphs_of_other_batches_alone(device, said):
    """Waiting for the device ends a capture, and torch's books of its memory with it."""

    def loss_fn(model, batch):
        if len(batch[0]) == 6:
            torch.cuda.synchronize()
        return BATCH_NORM.loss(model, batch)

    model, (x, y), optimizer = on(device, BATCH_NORM)
    step = CapturedStep(Curvature(model, loss_fn, optimizer, compile=False, batch_fraction=0.5))
    for size in (len(x), 6, 4):
        for _ in range(12):
            step((x[:size], y[:size]))
    assert sum("the step is not captured" in message for message in said.messages) == 1
    assert sum(graphs is not None for graphs in step._graphs.values()) == 2
    step((x, y))


@pytest.mark.parametrize("device", [device for device in DEVICES if device == "cuda"])
def test_a_pass_that_is_not_small_takes_no_memory_of_its_own(device, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))).to(device)
    x = torch.randn(65536, 256, device=device)  # beside which the workspace of another stream is small

    def of_graphs() -> int:
        gc.collect()  # steps refer to their graphs and these to the step
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) != (0, 0))

    def taken(*, small: int) -> int:
        monkeypatch.setattr(captured, "_SMALL", small)
        optimizer = AdaHessian(model.parameters(), lr=1e-6, update_every=2)
        curvature = Curvature(model, lambda m, b: m(b).square().mean(), optimizer, compile=False, batch_fraction=0.5)
        step = CapturedStep(curvature)
        before = of_graphs()
        for _ in range(4):
            step(x)
        return of_graphs() - before

    assert taken(small=-1) < 0.8 * taken(small=2**40)


@pytest.mark.parametrize("device", [device for device in DEVICES if device == "cuda"])
def test_schedules_evaluation_and_other_shapes_between_captured_steps(device):
    def train(make_step) -> list[Tensor]:
        model, (x, y), optimizer = on(device, BATCH_NORM)
        step = make_step(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        for number in range(STEPS):
            size = 5 if number % 6 == 5 else len(x)
            step((x[:size], y[:size]))
            scheduler.step()
            if number == 7:
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()
            if number == 11:  # other addresses
                for param in model.parameters():
                    param.data = param.data.clone()
            if number == 14:
                optimizer.load_state_dict(optimizer.state_dict())
        return all_values(model)

    def plain(model, optimizer):
        curvature = Curvature(model, BATCH_NORM.loss, optimizer, compile=False)

        def step(batch):
            curvature.measure(batch)
            optimizer.zero_grad()
            BATCH_NORM.loss(model, batch).backward()
            optimizer.step()

        return step

    def by_graphs(model, optimizer):
        return CapturedStep(Curvature(model, BATCH_NORM.loss, optimizer, compile=False))

    assert_alike(train(by_graphs), train(plain))
