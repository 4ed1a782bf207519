"""Requests made by hand, and what the tests of products have in common."""

import random

import numpy as np
import torch

from adahessian.hessian.double_backward import Request, double_backward
from adahessian.hessian.engine import SUBSTITUTES


def request_for(params, num_probes=1):
    """Ask for products with Rademacher probes, which depend on their number and on nothing else."""
    params = list(params)

    def draw(probe, out=None):
        generator = torch.Generator().manual_seed(probe)

        def signs(shape):
            return torch.randint(0, 2, shape, generator=generator).mul(2).sub(1)

        drawn = []
        for param in params:
            real = signs(param.shape).to(param.device, torch.float64)
            drawn.append((torch.complex(real, signs(param.shape).double()) if param.is_complex() else real).to(param))
        if out is not None:
            torch._foreach_copy_(list(out), drawn)
        return drawn

    return Request(params, num_probes, draw)


def derivatives(model, loss_fn, batch, *, substitutes=SUBSTITUTES, num_probes=1, **settings):
    """Differentiate twice by double backward, with the random numbers that a later call draws again."""
    state = torch.get_rng_state()
    request = request_for(model.parameters(), num_probes)
    found = double_backward(model, loss_fn, batch, request, substitutes=substitutes, **settings)
    torch.set_rng_state(state)
    return found


def squares(model, x):
    return model(x).square().mean()


def assert_alike(found, expected, **tolerances):
    """Two Derivatives are equal up to rounding, and not all zero."""
    torch.testing.assert_close(found, expected, **tolerances)
    assert any(each is not None and each.any() for each in expected.products[0])


def snapshot(model):
    """All that a pass could change."""
    return (
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        {name: id(buffer) for module in model.modules() for name, buffer in module._buffers.items()},
        {name: buffer._version for name, buffer in model.named_buffers()},
        [int(module.training) for module in model.modules()],
        [sorted(module.__dict__) for module in model.modules()],
        [param.grad.clone() for param in model.parameters() if param.grad is not None],
        [param.detach().clone() for param in model.parameters()],
        torch.get_rng_state(),
        list(random.getstate()[1]),
        [*np.random.get_state()[1].tolist(), np.random.get_state()[2]],
    )


def assert_same(before, after):
    for a, b in zip(before, after, strict=True):
        if isinstance(a, list) and a and isinstance(a[0], list):
            assert a == b
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0)
