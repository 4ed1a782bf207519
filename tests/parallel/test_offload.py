"""CPUOffloadPolicy is tested without a GPU, by fake tensors, which have devices but no values.

The tests in ``tests/test_stacks_on_devices.py`` use real values, but need a GPU.
"""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from adahessian import AdaHessian, AdaHessianKron, Curvature, diagnose
from adahessian.base.shards import gather, sum_to_shard
from adahessian.hessian.double_backward import Derivatives
from adahessian.hessian.isolation import devices_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a GPU"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]
GPU = torch.device("cuda", 0)


@pytest.fixture
def model(monkeypatch):
    """A model whose shards on the CPU belong to a mesh of two GPUs."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    for name, value in {"device_count": 1, "current_device": 0, "is_initialized": True, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(dist, name, on_gpu(getattr(dist, name)))
    number = torch.ops.aten._local_scalar_dense.default
    for table in (each for each in vars(fake_impls).values() if isinstance(each, dict) and number in each):
        monkeypatch.setitem(table, number, lambda mode, function, tensor: tensor.dtype.is_floating_point + 0)
    mesh = DeviceMesh("cuda", torch.arange(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        for module in model:
            for name, param in list(module._parameters.items()):
                spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(param.shape, param.stride(), param.dtype))
                half = param.detach()[: len(param) // 2].clone()
                module._parameters[name] = nn.Parameter(DTensor(half, spec, requires_grad=False))
        yield model
    dist.destroy_process_group()


def on_gpu(collective):
    """Check that a collective runs on the GPU, because NCCL has no collectives on the CPU."""

    def checked(*args, **kwargs):
        tensors = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
        assert {each.device for each in tensors if isinstance(each, torch.Tensor)} == {GPU}
        return collective(*args, **kwargs)

    return checked


def whole_on_gpu(batch, request):
    """Replace the pass, because PyTorch cannot differentiate on a GPU that does not exist."""
    probe = request.draw(0)
    assert {tensor.device for tensor in (*probe, *request.params)} == {GPU}
    ones = [torch.ones_like(param.detach()) for param in request.params]
    return Derivatives(torch.zeros((), device=GPU), ones, [probe], [ones])


class Layerwise:
    """A pass that returns products as shards."""

    def choose(self, batch, request):
        return True

    def measure(self, batch, request, weight):
        wholes = [torch.ones(param.shape, device=GPU) for param in request.params]
        parts = [sum_to_shard(whole, param) for whole, param in zip(wholes, request.params, strict=True)]
        return Derivatives(torch.zeros((), device=GPU), parts, [], [parts])


@pytest.mark.parametrize("layerwise", [None, Layerwise()], ids=["gathered", "layerwise"])
@pytest.mark.parametrize("kind", [AdaHessian, AdaHessianKron])
def test_shards_and_state_stay_on_the_cpu_and_everything_else_is_on_the_gpu(model, kind, layerwise):
    optimizer = kind(model.parameters(), lr=0.01)
    curvature = Curvature(model, lambda model, batch: model(batch).sum(), optimizer)
    curvature._layerwise, curvature.engine.measure = layerwise, whole_on_gpu
    for _ in range(2):
        assert curvature.measure(torch.ones(4, 6, device=GPU))
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    shards = [value.to_local() for value in (*model.parameters(), *values) if isinstance(value, DTensor)]
    assert {value.device.type for value in (*values, *shards)} == {"cpu"}
    with pytest.warns(UserWarning, match="dropped"):  # every number that is read is 1
        assert len(diagnose(optimizer, model)) > 1
    assert {gather(param).device.type for param in model.parameters()} == {"cpu"}
    assert devices_of(model) == {GPU}  # a pass must restore the random state of this device
