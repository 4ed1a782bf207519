"""A pass leaves no trace, and runs on kernels that can be differentiated twice."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from requested import assert_same, derivatives, request_for, snapshot, squares
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from adahessian.hessian.double_backward import double_backward
from adahessian.hessian.isolation import buffers_restored, devices_of, hooks_silenced, isolated, random_state_kept


class Everything(nn.Module):
    """Batch norm, dropout, and randomness from Python and NumPy."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.calls += 1
        scale = 1 + random.random() + np.random.rand()
        return scale * self.linear(self.dropout(self.norm(x)))


def meddling(model, x):
    model.train()
    model.zero_grad(set_to_none=False)
    return squares(model, x)


def failing(model, x):
    meddling(model.eval(), x)
    raise KeyError("the user's own")


@pytest.mark.parametrize("loss", [meddling, failing])
def test_the_pass_leaves_no_trace(loss):
    model, x = Everything(), torch.randn(16, 4)
    model.dropout.eval()  # a mode of its own
    squares(model, x).backward()
    before = snapshot(model)
    with random_state_kept(model):
        try:
            double_backward(model, loss, x, request_for(model.parameters()))
        except KeyError:
            assert loss is failing
    assert_same(before, snapshot(model))


def test_buffers_are_kept_if_that_is_asked_for_and_the_pass_succeeds():
    model, x = Everything(), torch.randn(16, 4)
    before = snapshot(model)
    with pytest.raises(KeyError):
        derivatives(model, failing, x, keep_buffers=True)
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.testing.assert_close(values, before[0], rtol=0, atol=0)
    tensors = list(model.buffers())
    derivatives(model, meddling, x, keep_buffers=True)
    assert model.calls == 1
    assert model.norm.num_batches_tracked == 1
    assert list(map(id, model.buffers())) == list(map(id, tensors)), "compiled code knows their addresses"


@pytest.mark.parametrize("is_training", [True, False])
def test_a_graph_that_waits_for_its_backward_is_not_disturbed(is_training):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(is_training), torch.randn(8, 4)
    loss = squares(model, x)
    derivatives(model, squares, x)
    loss.backward()


def test_buffers_that_modules_share_stay_shared():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    with isolated(model, {}):
        assert model[0].running_mean is model[1].running_mean
    assert model[0].running_mean is model[1].running_mean


def test_a_table_that_grew_in_the_pass_stays():
    class Positions(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("table", torch.ones(1))
            self.register_buffer("made", None)

        def forward(self, x):
            self.table, self.made = torch.ones(len(x)), torch.ones(1)
            return super().forward(x) * self.table[:, None]

    model = Positions()
    derivatives(model, squares, torch.randn(5, 2))
    assert model.table.shape == (5,)
    assert model.made is not None


def test_hooks_do_not_run_and_work_afterwards():
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    seen = []
    model.weight.register_hook(seen.append)
    model.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    for keep_buffers in (False, True):
        derivatives(model, squares, x, keep_buffers=keep_buffers)
    assert not seen
    squares(model, x).backward()
    assert len(seen) == 2
    with hooks_silenced(model.parameters()):
        torch.autograd.grad(squares(model, x), model.weight)
    assert len(seen) == 2
    torch.autograd.grad(squares(model, x), model.weight)
    assert len(seen) == 3


def test_random_states_are_kept_and_rehearsals_undone_in_place():
    model, x = Everything(), torch.randn(16, 4)
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    values, addresses = [b.clone() for b in model.buffers()], [b.data_ptr() for b in model.buffers()]
    with random_state_kept(model), buffers_restored(model):
        squares(model, x)
        torch.rand(1)
        model.calls = torch.ones(())  # another tensor
        assert not torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), repr(np.random.get_state())) == states[1:]
    torch.testing.assert_close([*model.buffers()], values, rtol=0, atol=0)
    assert [b.data_ptr() for b in model.buffers()] == addresses


def test_the_pass_sees_the_dropout_that_the_gradient_will_see():
    model, x = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)), torch.randn(8, 4)
    masks = []

    def loss(model, x):
        output = model(x)
        masks.append(output == 0)
        return output.square().mean()

    with random_state_kept(model):
        double_backward(model, loss, x, request_for(model.parameters()))
    loss(model, x)
    assert torch.equal(*masks)


def test_kernels_have_second_derivatives():
    model = nn.LSTM(3, 3)
    enabled = torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled()
    flash = torch.backends.cuda.flash_sdp_enabled()
    with isolated(model, {}):
        assert (torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled()) == (False, False)
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert (torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled()) == enabled
    assert torch.backends.cuda.flash_sdp_enabled() == flash
    with isolated(nn.Linear(3, 3), {}):
        assert torch._C._get_mkldnn_enabled() == enabled[1]


def test_compiled_parts_run_eagerly_unless_the_pass_is_compiled():
    calls = []

    def backend(module, inputs):
        calls.append(module)
        return module.forward

    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    compiled = torch.compile(model, backend=backend)
    with isolated(compiled, {}):
        compiled(x)
    assert not calls
    with isolated(compiled, {}, compiled=True):
        compiled(x)
    assert calls


IN_A_NEW_PROCESS = """
import sys, torch
from requested import derivatives, squares
derivatives(torch.nn.Conv1d(2, 2, 2), squares, torch.ones(1, 2, 3))
assert "torch._dynamo" not in sys.modules
"""


def test_the_compiler_is_not_imported_for_it():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], check=True, env=environment, timeout=300)


def test_devices():
    assert devices_of(nn.Linear(2, 2)) == {torch.device("cpu")}
    assert devices_of(nn.Linear(2, 2, device="meta")) == {torch.device("meta")}


# Substitutes ---------------------------------------------------------------------------------------------------------


def doubled(module, x):
    return 2 * F.linear(x, module.weight, module.bias)


class Subclass(nn.Linear):
    pass


class Other(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def with_own_forward():
    model = nn.Linear(3, 2)
    model.forward = lambda x: F.linear(x, model.weight, model.bias)
    return model


def with_another_class():
    """As FSDP2 does."""
    model = nn.Linear(3, 2)
    model.__class__ = type("FSDPLinear", (nn.Linear,), {})
    return model


def parametrized():
    return parametrize.register_parametrization(nn.Linear(3, 2), "weight", nn.Tanh())


@pytest.mark.parametrize(
    ("make", "is_substituted"),
    [
        (lambda: nn.Linear(3, 2), True),
        (lambda: Subclass(3, 2), True),
        (with_another_class, True),
        (parametrized, True),
        (lambda: Other(3, 2), False),
        (with_own_forward, False),
        (lambda: torch.jit.script(nn.Linear(3, 2)), False),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_layers_with_the_forward_of_their_class_are_substituted_for_the_length_of_a_pass(make, is_substituted):
    model, x = nn.Sequential(make()), torch.randn(4, 3)
    expected = model(x)
    for _ in range(2):
        with isolated(model, {nn.Linear.forward: doubled}):
            torch.testing.assert_close(model(x), (1 + is_substituted) * expected)
            with isolated(model, {nn.Linear.forward: doubled}):
                model(x)
            torch.testing.assert_close(model(x), (1 + is_substituted) * expected)
        torch.testing.assert_close(model(x), expected)


def test_functions_of_torch_stay_as_they_are():
    before = F.conv2d, F.linear, F.batch_norm, F.scaled_dot_product_attention, torch._VF.lstm
    with isolated(nn.Conv2d(1, 1, 1), {nn.Conv2d.forward: doubled}):
        assert (F.conv2d, F.linear, F.batch_norm, F.scaled_dot_product_attention, torch._VF.lstm) == before


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_wrappers_inside_a_model_are_passed_by(monkeypatch):
    inner = nn.Linear(4, 2)
    model, x = nn.Sequential(nn.Linear(4, 4), DistributedDataParallel(inner)), torch.randn(8, 4)
    plain = nn.Sequential(model[0], inner)
    expected = derivatives(plain, squares, x)
    monkeypatch.setattr(DistributedDataParallel, "_pre_forward", None)
    torch.testing.assert_close(derivatives(model, squares, x), expected)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("is_training", [True, False])
def test_synchronized_batch_norm_uses_the_statistics_of_its_process(is_training):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()).double().train(is_training)
    x = torch.randn(8, 4, dtype=torch.float64)
    expected = derivatives(model, squares, x, keep_buffers=True), [buffer.clone() for buffer in model.buffers()]
    model[1].reset_running_stats()
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    torch.testing.assert_close(
        (derivatives(synchronized, squares, x, keep_buffers=True), list(synchronized.buffers())), expected
    )
    if is_training:
        with pytest.raises(ValueError, match="GPU"):  # torch's own asks other processes
            synchronized(x)
