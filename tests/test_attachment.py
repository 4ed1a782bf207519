"""A loop that only calls the model measures the curvature of its loss, and is otherwise unaffected."""

import copy
import gc
import io
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian, AdaHessianKron, Curvature, CurvatureError, attach
from cases import CASES, MLP, RECURRENT, Case, flat_parameters

BOTH = Case(
    "batch norm and dropout",
    lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 3)),
    (16, 5),
)
OPTIONS = {"lr": 0.01, "curvature_every": 3, "curvature_warmup": 2}


class WithLoss(nn.Module):
    """A model that computes its own loss."""

    def __init__(self, case=MLP):
        super().__init__()
        self.layers = case.model()

    def forward(self, x, *, labels):
        outputs = self.layers(x)
        return {"loss": cross_entropy(outputs, labels), "outputs": outputs}


def loss_of(output):
    return output["loss"]


def take_step(model, optimizer, loss, **options):
    optimizer.zero_grad()
    loss.backward(**options)
    optimizer.step()
    assert not any(param.grad is not None and param.grad.requires_grad for param in model.parameters())


def train(way, case, make=AdaHessianKron, **options):
    model = case.model()
    optimizer = make(model.parameters(), **{**OPTIONS, **options})
    if way == "attached":
        attach(model, optimizer)
    measure = Curvature(model, case.loss, optimizer, batch_fraction=1).measure
    torch.manual_seed(3)
    for number in range(8):
        batch = case.batch(seed=number)
        if way == "measured":
            measure(batch)
        loss = case.loss(model, batch)
        take_step(model, optimizer, loss, create_graph=way == "classic" and optimizer.curvature_due)
    return flat_parameters(model), loss.detach()


# Any loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [AdaHessianKron, AdaHessian])
@pytest.mark.parametrize("case", [MLP, BOTH], ids=str)
def test_an_attached_loop_is_the_classic_loop_bit_by_bit(case, make):
    torch.testing.assert_close(train("attached", case, make), train("classic", case, make), rtol=0, atol=0)


@pytest.mark.parametrize("case", [*CASES, RECURRENT], ids=str)
def test_it_measures_what_a_curvature_measures_on_the_whole_batch(case):
    torch.testing.assert_close(train("attached", case), train("measured", case), rtol=1e-9, atol=1e-12)


def test_it_measures_only_when_due_and_warns_of_nothing():
    model, (x, y) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), curvature_every=3)
    attach(model, optimizer)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for due in (True, False, False, True, False):
                assert optimizer.curvature_due == due
                outputs = model(x)
                assert (type(outputs) is torch.Tensor) != due
                take_step(model, optimizer, cross_entropy(outputs, y))
    finally:
        torch.set_warn_always(False)


@dataclass
class Outputs:
    first: torch.Tensor
    rest: Any


def mean_in_lines(outputs, y):
    """Use outputs as loops do, in place, as numbers, and split."""
    first, (second,) = outputs.first, outputs.rest["list"]
    assert outputs.rest["number"] == 3
    print(f"{second.mean():.3f}", float(first.detach().mean()), first.shape, first.argmax(1).eq(y).float().mean())
    left, right = second.split([1, 2], 1)
    first += torch.cat([left, right.exp()], 1)
    top = first.sort(1)
    return cross_entropy(top.values, y) + first.square().mean()


def test_outputs_may_be_nested_and_the_loss_may_take_several_lines():
    (x, y), ends = MLP.batch(), []

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = MLP.model()

        def forward(self, x):
            return Outputs(self.layers(x), {"list": [self.layers(x.tanh())], "number": 3})

    for is_attached in (True, False):
        model = Several()
        optimizer = AdaHessian(model.parameters(), lr=0.05)
        if is_attached:
            attach(model, optimizer)
        for _ in range(3):
            take_step(model, optimizer, mean_in_lines(model(x), y), create_graph=not is_attached)
        ends.append(flat_parameters(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("joined", [False, True])
def test_gradients_of_several_losses_are_measured_as_their_sum(joined):
    ends = []
    for is_attached in (True, False):
        model, (x, y) = MLP.model(), MLP.batch()
        optimizer = AdaHessian(model.parameters(), lr=0.05)
        if is_attached:
            attach(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            losses = [cross_entropy(model(x[part]), y[part]) / 2 for part in (slice(0, 8), slice(8, 16))]
            options = {} if is_attached else {"create_graph": True}
            if joined:
                torch.autograd.backward(losses, **options)
            else:
                for loss in losses:
                    loss.backward(**options)
            optimizer.step()
        ends.append(flat_parameters(model))
    assert torch.equal(*ends)


def test_a_loss_with_derivatives_of_the_outputs_is_measured():
    ends = []
    for is_attached in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = AdaHessianKron(model.parameters(), **OPTIONS)
        if is_attached:
            attach(model, optimizer)
        x = torch.linspace(0, 1, 9, dtype=torch.float64).view(-1, 1).requires_grad_()
        for _ in range(4):
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = (slope - x.cos()).square().mean() + model(torch.zeros_like(x)).square().mean()
            take_step(model, optimizer, loss, create_graph=not is_attached)
        ends.append(flat_parameters(model))
    assert torch.equal(*ends)


def test_a_scaled_and_clipped_loss_is_measured():
    ends = []
    for is_attached in (True, False):
        model, scaler = MLP.model(torch.float32), torch.amp.GradScaler("cpu")
        optimizer = AdaHessian(model.parameters(), lr=0.05)
        if is_attached:
            attach(model, optimizer)
        for number in range(4):
            optimizer.zero_grad()
            loss = MLP.loss(model, MLP.batch(torch.float32, seed=number))
            scaler.scale(loss).backward(create_graph=not is_attached)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        ends.append(flat_parameters(model))
    assert torch.equal(*ends)


class Labels(torch.Tensor):
    """A tensor subclass of a library, which rejects the subclasses of other libraries."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs) if {*types} <= {cls} else NotImplemented


def test_targets_of_another_subclass_are_tensors():
    model, (x, y) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    attach(model, optimizer)
    take_step(model, optimizer, cross_entropy(model(x), y.as_subclass(Labels)))
    assert optimizer.param_groups[0]["measurements"] == 1


def test_kernels_have_second_derivatives_in_the_forward_pass_only():
    seen = []

    class Looking(nn.LSTM):
        def forward(self, x):
            seen.append((torch.backends.cuda.flash_sdp_enabled(), torch._C._get_cudnn_enabled()))
            if x is None:
                raise KeyError("the user's own")
            return super().forward(x)

    model = Looking(4, 3)
    before = torch.backends.cuda.flash_sdp_enabled(), torch._C._get_cudnn_enabled()
    optimizer = AdaHessian(model.parameters(), curvature_every=2)
    attach(model, optimizer)
    with pytest.raises(KeyError, match="the user's own"):
        model(None)
    for _ in range(2):
        assert before == (torch.backends.cuda.flash_sdp_enabled(), torch._C._get_cudnn_enabled())
        take_step(model, optimizer, model(torch.randn(5, 2, 4))[0].square().mean())
    assert seen == [(False, False), (False, False), before]


@pytest.mark.parametrize("end", ["call", "remove"])
def test_an_interrupted_forward_pass_restores_kernels_in_the_next_one_or_with_the_hooks(end):
    before = torch.backends.cuda.flash_sdp_enabled()
    model = nn.Linear(4, 3)
    attachment = attach(model, AdaHessian(model.parameters()))

    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 4))
    handle.remove()
    if end == "remove":
        attachment.remove()
    else:
        with torch.no_grad():
            model(torch.ones(2, 4))
    assert torch.backends.cuda.flash_sdp_enabled() == before


def test_gradients_of_parameters_that_the_optimizer_lacks_keep_no_graph():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = AdaHessian(model[2].parameters())
    handle = attach(model, optimizer)
    for _ in range(2):  # gradients accumulate, because they are not set to zero
        take_step(model, optimizer, model(torch.randn(8, 4)).square().mean())
        assert not any(param.grad.requires_grad for param in model[0].parameters())
    handle.remove()
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_runs_its_original_code_when_a_measurement_is_due():
    ends = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        model = MLP.model()
        optimizer = AdaHessianKron(model.parameters(), **OPTIONS)
        called = torch.compile(model, backend="aot_eager") if is_compiled else model
        attach(called, optimizer)
        for number in range(4):
            take_step(model, optimizer, MLP.loss(called, MLP.batch(seed=number)))
        ends.append(flat_parameters(model))
    torch.testing.assert_close(*ends)


class Fused(torch.autograd.Function):
    """A loss whose backward hides its graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (2 * g * x).detach()


def fused(outputs):
    (Fused.apply(outputs) + outputs.mean()).square().backward()


def compiled(outputs):
    torch.compile(lambda outputs: outputs.square().mean(), backend="eager")(outputs)


def untraced(outputs):
    Fused.apply(outputs).backward()


def reentrant(outputs):
    checkpoint(torch.tanh, outputs, use_reentrant=True).square().mean().backward()


@pytest.mark.parametrize("backward", [fused, compiled, untraced, reentrant])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_losses_that_cannot_be_measured_are_errors_before_the_step(backward):
    torch._dynamo.reset()
    model, (x, _) = MLP.model(), MLP.batch()
    before, optimizer = flat_parameters(model), AdaHessian(model.parameters())
    attach(model, optimizer)

    def step():
        backward(model(x))
        optimizer.step()

    # The compiler wraps errors in its own exception.
    with pytest.raises(
        (CurvatureError, torch._dynamo.exc.InternalTorchDynamoError), match=r"Fused|adahessian\.Curvature"
    ):
        step()
    assert torch.equal(flat_parameters(model), before)


def test_reentrant_checkpointing_in_the_model_is_rejected_before_the_gradient():
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh()).double()
    model[1].forward = lambda x: checkpoint(torch.tanh, x, use_reentrant=True)
    attach(model, AdaHessian(model.parameters()))
    loss = model(MLP.batch()[0]).square().mean()
    with pytest.raises(CurvatureError, match="use_reentrant"):
        loss.backward()
    assert model[0].weight.grad is None


# A loss of the model itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"batch_fraction": 1.0}, {"batch_fraction": lambda call: call}], ids=range(3))
def test_a_loss_of_the_output_is_measured_as_by_a_curvature(options):
    ends = []
    for is_attached in (True, False):
        model = WithLoss(BOTH)
        optimizer = AdaHessianKron(model.parameters(), **OPTIONS)
        measure = Curvature(model, lambda model, batch: model(batch[0], labels=batch[1])["loss"], optimizer, **options)
        if is_attached:
            attach(model, optimizer, loss_of_output=loss_of, **options)
        torch.manual_seed(3)
        for number in range(6):
            optimizer.zero_grad()
            for x, y in (MLP.batch(seed=number), MLP.batch(seed=-1 - number)):
                is_attached or measure.measure((x, y))
                (model(x, labels=y)["loss"] / 2).backward()
            optimizer.step()
        ends.append(flat_parameters(model))
    assert torch.equal(*ends)


def test_hooks_that_change_the_inputs_run_once_in_each_pass():
    model, (x, y) = WithLoss(), MLP.batch()
    optimizer, seen = AdaHessian(model.parameters()), []
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.layers.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    attach(model, optimizer, loss_of_output=loss_of, batch_fraction=0.5)
    model(x, labels=y)
    assert not optimizer.curvature_due
    assert [torch.equal(found, x[: len(found)] + 1) for found in seen] == [True, True]
    assert list(map(len, seen)) == [8, 16]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", ["before", "in place", "after"])
def test_compiled_models_with_a_loss_may_be_attached_at_any_time(way):
    torch._dynamo.reset()
    model, (x, y) = WithLoss(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.05)
    called = torch.compile(model, backend="aot_eager") if way == "before" else model
    if way == "in place":
        model.compile(backend="aot_eager")
    attach(called, optimizer, loss_of_output=loss_of)
    if way == "after":
        called = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        take_step(model, optimizer, called(x, labels=y)["loss"])
    assert optimizer.param_groups[0]["measurements"] == 2


def test_the_pass_of_an_attached_model_can_be_compiled(quick_compiler, said):
    model, (x, y) = WithLoss(), MLP.batch()
    attach(model, AdaHessian(model.parameters()), loss_of_output=loss_of, compile=True)
    model(x, labels=y)
    assert any("compiled forward over reverse" in message for message in said.messages)


def test_inputs_with_a_graph_are_rejected_before_anything_changes():
    encoder, model, (x, y) = nn.Linear(5, 5).double(), WithLoss(), MLP.batch()
    optimizer = AdaHessian([*encoder.parameters(), *model.parameters()])
    attach(model, optimizer, loss_of_output=loss_of)
    with pytest.raises(ValueError, match="model"):
        model(encoder(x), labels=y)
    assert optimizer.curvature_due


def test_a_pass_that_fails_keeps_the_hooks():
    model, (x, y) = WithLoss(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    attach(model, optimizer, loss_of_output=lambda output: output["outputs"])
    for _ in range(2):
        with pytest.raises(CurvatureError):
            model(x, labels=y)
    assert optimizer.curvature_due


# Both -----------------------------------------------------------------------------------------------------------------


def attached(with_loss):
    model = WithLoss(BOTH)
    optimizer = AdaHessian(model.parameters(), lr=0.05)
    return model, optimizer, attach(model, optimizer, **({"loss_of_output": loss_of} if with_loss else {}))


def is_measured(model, optimizer):
    """Return whether a training step is possible."""
    x, y = MLP.batch()
    try:
        take_step(model, optimizer, model(x, labels=y)["loss"])
    except CurvatureError:
        return False
    return True


@pytest.mark.parametrize("with_loss", [False, True])
def test_evaluation_is_left_alone(with_loss):
    model, optimizer, _ = attached(with_loss)
    x, y = MLP.batch()
    with torch.no_grad():
        assert type(model(x, labels=y)["loss"]) is torch.Tensor
    model.eval()
    assert type(model(x, labels=y)["loss"]) is torch.Tensor
    assert optimizer.curvature_due
    model.train()
    assert is_measured(model, optimizer)


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_a_file, AveragedModel]
)
def test_copies_are_not_attached(copied, with_loss):
    model, optimizer, _ = attached(with_loss)
    twin = copied(model)
    x, y = MLP.batch()
    assert type(twin(x, labels=y)["loss"]) is torch.Tensor
    assert optimizer.curvature_due
    assert not is_measured(twin, AdaHessian(twin.parameters()))
    assert is_measured(model, optimizer)


@pytest.mark.parametrize("with_loss", [False, True])
def test_removed_hooks_leave_nothing(with_loss):
    model, optimizer, handle = attached(with_loss)
    assert is_measured(model, optimizer)
    handle.remove()
    handle.remove()
    hooks = [value for name, value in vars(model).items() if "hooks" in name]
    assert hooks
    assert not any(hooks)
    del handle
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks
    assert not is_measured(model, AdaHessian(model.parameters()))


@pytest.mark.parametrize("with_loss", [False, True])
def test_only_the_newest_optimizer_is_measured_for(with_loss):
    model, first, _ = attached(with_loss)
    second = AdaHessian(model.parameters(), lr=0.05)
    attach(model, second, loss_of_output=loss_of)
    assert is_measured(model, second)
    assert first.curvature_due
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1


def test_checkpoints_of_the_model_and_the_optimizer_resume_bit_by_bit():
    def run(model, optimizer, numbers):
        for number in numbers:
            x, y = MLP.batch(seed=number)
            take_step(model, optimizer, model(x, labels=y)["loss"])

    model, optimizer, _ = attached(False)
    torch.manual_seed(3)
    run(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    run(model, optimizer, range(3, 6))
    resumed, its_optimizer, _ = attached(False)
    resumed.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    run(resumed, its_optimizer, range(3, 6))
    assert torch.equal(flat_parameters(model), flat_parameters(resumed))


def test_wrong_arguments():
    model = WithLoss()
    optimizer = AdaHessian(model.parameters())
    for arguments in ((optimizer, model), (model, torch.optim.SGD(model.parameters())), (model.forward, optimizer)):
        with pytest.raises(TypeError, match=r"model, .*optimizer"):
            attach(*arguments)
    with pytest.raises(TypeError, match="batch_fraction"):
        attach(model, optimizer, batch_fraction=0.5)
    with pytest.raises(ValueError, match="batch_fraction"):
        attach(model, optimizer, loss_of_output=loss_of, batch_fraction=2)
    assert not model._forward_pre_hooks
