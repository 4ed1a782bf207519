"""A step does not wait for the device, and keeps no memory."""

import gc
import math

import pytest
import torch
from torch import nn

from adahessian import AdaHessian
from cases import MLP, train


@pytest.fixture
def forbid_reads(monkeypatch):
    """Forbids reading values off tensors, which waits for their device; a few may be allowed."""

    def forbid(allowed):
        numbers = {id(tensor) for tensor in allowed}
        for reader in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
            original = getattr(torch.Tensor, reader)

            def guarded(self, *args, _original=original, **kwargs):
                assert id(self) in numbers, "a tensor was read on the host"
                return _original(self, *args, **kwargs)

            monkeypatch.setattr(torch.Tensor, reader, guarded)

    return forbid


def step_counts(optimizer):
    """The step counts of all parameters, which are on the host, and the tensor that they are elements of."""
    counts = [state["step"] for state in optimizer.state.values()]
    return [*counts, *(count._base for count in counts)]


def live_tensors():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_no_live_graph_and_flat_memory_over_200_steps():
    """The collector is off, so that tensors in a cycle would pile up."""
    model, batch = MLP.model(torch.float32), MLP.batch(torch.float32)
    for way in ("graph", "closure", "object"):
        optimizer = AdaHessian(model.parameters(), lr=1e-3, curvature_every=2)
        train(MLP, model, optimizer, batch, 5, way)
        gc.collect()
        gc.disable()
        try:
            before = live_tensors()
            train(MLP, model, optimizer, batch, 200, way)
            after = live_tensors()
        finally:
            gc.enable()
        assert after <= before, way
        assert all(param.grad.grad_fn is None for param in model.parameters())


def test_no_device_is_waited_for_in_an_ordinary_step(forbid_reads):
    """The step counts are on the host, in one tensor, and may be read."""
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), curvature_every=100)
    train(MLP, model, optimizer, batch, 1, "object")
    MLP.loss(model, batch).backward()
    forbid_reads(allowed=step_counts(optimizer))
    optimizer.step()


def test_no_device_is_waited_for_in_a_step_that_measures(forbid_reads):
    param = nn.Parameter(torch.ones(4, 6))
    optimizer = AdaHessian([param], block_size=4)
    param.grad = torch.ones(4, 6)
    optimizer.set_curvature({param: torch.ones(4, 6)})
    optimizer.step()
    optimizer.set_curvature({param: torch.full((4, 6), math.nan)}, {param: torch.ones(4, 6)})
    forbid_reads(allowed=step_counts(optimizer))
    optimizer.step()
