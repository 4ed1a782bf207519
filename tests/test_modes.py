"""Every way to take a step trains as the plain loop does: on batch norm, attention and a recurrent layer."""

import gc

import pytest
import torch
from torch import Tensor, nn

from adahessian import AdaHessian, AdaHessianKron, Curvature, TrainingStep
from cases import ATTENTION, BATCH_NORM, MLP, RECURRENT, REGRESSION, Case

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
on_gpus = pytest.mark.parametrize("device", [device for device in DEVICES if device == "cuda"])
CASES = [BATCH_NORM, ATTENTION, RECURRENT]
STEPS = 20
OFTEN = 50  # a second kind of batch is captured after so many


@pytest.fixture(autouse=True)
def full_float32():
    """Convolutions on a GPU use tf32 by default, and then no two ways agree to float32's digits."""
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=cudnn.enabled, allow_tf32=False):
        yield


def on(device: str, case: Case) -> tuple[nn.Module, tuple[Tensor, Tensor], AdaHessian]:
    model = case.model(torch.float32).to(device)
    x, y = case.batch(torch.float32)
    optimizer = AdaHessian(model.parameters(), lr=0.05, eps=1e-2, curvature_every=3, num_probes=2, block_size=2)
    return model, (x.to(device), y.to(device)), optimizer


def all_values(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in (*model.parameters(), *model.buffers())]


def plain_step(curvature: Curvature):
    def step(batch):
        curvature.measure(batch)
        curvature.optimizer.zero_grad()
        curvature.loss_fn(curvature.model, batch).backward()
        curvature.optimizer.step()

    return step


def values_after(device: str, case: Case, make_step, **options) -> list[Tensor]:
    model, batch, optimizer = on(device, case)
    curvature = Curvature(model, case.loss, optimizer, **options)
    step = make_step(curvature)
    for _ in range(STEPS):
        step(batch)
    if options.get("compile") and case is not RECURRENT:  # a fallback would pass every comparison
        assert curvature.engine.description.startswith("compiled")
    return all_values(model)


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def uncaptured(curvature: Curvature) -> TrainingStep:
    return TrainingStep(curvature, capture=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
class TestModes:
    @pytest.mark.parametrize("fraction", [1.0, 0.5])
    def test_uncompiled_step(self, device, case, fraction):
        found = values_after(device, case, uncaptured, compile=False, batch_fraction=fraction)
        assert_alike(found, values_after(device, case, plain_step, compile=False, batch_fraction=fraction))

    def test_compiled_step(self, device, case):
        found = values_after(device, case, uncaptured, compile=True)
        assert_alike(found, values_after(device, case, plain_step, compile=False))


@pytest.mark.parametrize("device", DEVICES)
def test_zero_tangents_without_memory(device):
    """The derivatives of the mean square error have some, at whose address compiled code must not look."""
    found = values_after(device, REGRESSION, uncaptured, compile=True)
    assert_alike(found, values_after(device, REGRESSION, plain_step, compile=False))


@on_gpus
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("compile", [False, True])
def test_captured_step(device, case, fraction, compile, said):
    found = values_after(device, case, TrainingStep, compile=compile, batch_fraction=fraction)
    assert_alike(found, values_after(device, case, plain_step, compile=False, batch_fraction=fraction))
    assert not any("not captured" in message for message in said.messages)


@pytest.mark.parametrize(
    ("device", "compile"), [(device, c) for device in DEVICES for c in sorted({False, device == "cuda"})]
)
def test_factors_of_two_groups_follow_a_schedule_on_two_kinds_of_batch(device, compile, said):
    results = []
    for make_step in (TrainingStep, plain_step):
        model, batch, _ = on(device, BATCH_NORM)
        model[0].bias.requires_grad_(False)  # its gradient is a rounding error, scaled to AdamW's length
        few = tuple(part[: len(part) // 2] for part in batch)
        params = [param for param in model.parameters() if param.requires_grad]
        matrices, vectors = ([p for p in params if (p.dim() > 1) == wanted] for wanted in (True, False))
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = AdaHessianKron(groups, lr=0.01, block_size=4, curvature_every=2, curvature_warmup=0)
        options = {"compile": compile and make_step is TrainingStep, "batch_fraction": 0.5}
        step = make_step(Curvature(model, BATCH_NORM.loss, optimizer, **options))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
        for number in range(STEPS + OFTEN + STEPS):
            step(batch if number < STEPS else few)
            scheduler.step()
        results.append(all_values(model))
    assert_alike(*results)
    assert not any("not captured" in message for message in said.messages)


@on_gpus
@pytest.mark.parametrize("case", [*CASES, MLP], ids=str)
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "make", [torch.optim.SGD, lambda params, lr: torch.optim.AdamW(params, lr, eps=1e-2, fused=True)]
)
def test_captured_step_of_a_plain_optimizer(device, case, compile, make, said):
    results = []
    for captured in (False, True):
        model, batch, _ = on(device, case)
        optimizer = make(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        step = TrainingStep(model, case.loss, optimizer, compile=compile)
        for _ in range(STEPS):
            if captured:
                step(batch)
            else:
                optimizer.zero_grad()
                case.loss(model, batch).backward()
                optimizer.step()
            scheduler.step()
        results.append(all_values(model))
    assert_alike(*results)
    assert not any("not captured" in message for message in said.messages)


@on_gpus
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_random_numbers_under_autocast(device, dropout):
    """The curvature of a slice leaves the generator alone, so the dropout masks are those without it."""
    states, values = [], []
    for capture in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 4)).to(device)
        optimizer = AdaHessian(model.parameters(), lr=0.01, eps=1e-2, curvature_every=2)
        curvature = Curvature(model, lambda m, x: m(x).square().mean(), optimizer, compile=False, batch_fraction=0.5)
        step, x = TrainingStep(curvature, capture=capture), torch.randn(64, 16).to(device)
        for _ in range(7):
            with torch.autocast(device, torch.bfloat16):
                step(x)
        states.append(torch.cuda.get_rng_state())
        values.append(all_values(model))
    for found, expected in zip(values[1], values[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)
    assert torch.equal(*states)


@on_gpus
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_graphs_in_the_same_memory(device, fraction):
    """Batches of two sizes: four graphs, in any order."""

    def train(make_step) -> tuple[object, list[Tensor]]:
        model, (x, y), optimizer = on(device, BATCH_NORM)
        step = make_step(Curvature(model, BATCH_NORM.loss, optimizer, compile=False, batch_fraction=fraction))
        for number in range(2 * OFTEN + 20):
            size = len(x) if number % 2 else 6
            step((x[:size], y[:size]))
        return step, all_values(model)

    step, found = train(TrainingStep)
    assert len(step._graphs) == 2
    assert_alike(found, train(plain_step)[1])


@on_gpus
def test_a_capture_that_fails_leaves_graphs_of_other_batches_alone(device, said):
    """Waiting for the device ends a capture, and with it torch's bookkeeping of its memory."""

    def loss_fn(model, batch):
        if len(batch[0]) == 6:
            torch.cuda.synchronize()
        return BATCH_NORM.loss(model, batch)

    model, (x, y), optimizer = on(device, BATCH_NORM)
    step = TrainingStep(Curvature(model, loss_fn, optimizer, compile=False, batch_fraction=0.5))
    for size in (len(x), 6, 4):
        for _ in range(OFTEN + 5):
            step((x[:size], y[:size]))
    assert sum("not captured" in message for message in said.messages) == 1
    assert sum(graphs is not None for graphs in step._graphs.values()) == 2
    step((x, y))


@on_gpus
def test_modules_that_replace_buffers_run_uncaptured(device, said):
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(5, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return super().forward(x) * self.count

    model = Counting().to(device)
    step = TrainingStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), 0.01))
    for _ in range(4):
        step(torch.randn(8, 5, device=device))
    assert model.count.item() == 4
    assert sum("replaces a buffer" in message for message in said.messages) == 1


@on_gpus
def test_the_curvature_of_a_slice_finds_its_memory_within_that_of_the_gradient(device):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))).to(device)
    x = torch.randn(65536, 256, device=device)  # compared with which workspaces are small

    def loss_fn(model, batch):
        return model(batch).square().mean()

    def of_graphs() -> int:
        gc.collect()  # steps and their graphs refer to each other
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) != (0, 0))

    def taken(make_step) -> int:
        step, before = make_step(), of_graphs()
        for _ in range(4):
            step(x)
        return of_graphs() - before

    def with_curvature() -> TrainingStep:
        optimizer = AdaHessian(model.parameters(), lr=1e-6, curvature_every=2)
        return TrainingStep(Curvature(model, loss_fn, optimizer, compile=False, batch_fraction=0.125))

    def without() -> TrainingStep:
        return TrainingStep(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-6), compile=False)

    assert taken(with_curvature) < 1.3 * taken(without)


@on_gpus
def test_schedules_evaluation_and_other_shapes_between_captured_steps(device):
    def train(make_step) -> list[Tensor]:
        model, (x, y), optimizer = on(device, BATCH_NORM)
        step = make_step(Curvature(model, BATCH_NORM.loss, optimizer, compile=False))
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
            if number == 16:
                model[0].weight.requires_grad_(False)
                model[0].weight.grad = None
        return all_values(model)

    assert_alike(train(TrainingStep), train(plain_step))
