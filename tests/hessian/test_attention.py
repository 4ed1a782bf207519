"""Attention in plain operations: torch's values, and differentiable in every way."""

import threading
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from adahessian.hessian import attention as module
from adahessian.hessian.attention import attention, plain_attention

KEYS = torch.tensor([[1, 0, 0, 1, 1], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]]).bool()


def inputs(heads=2, key_heads=2, dtype=torch.float64):
    """Query, key and value: 4 positions that look at 5."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, heads, 4, 6), (3, key_heads, 5, 6), (3, key_heads, 5, 7)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.fixture
def calls(monkeypatch):
    """The arguments of calls of plain attention."""
    seen = []

    def watched(*args, **kwargs):
        seen.append(kwargs)
        return attention(*args, **kwargs)

    monkeypatch.setattr(module, "attention", watched)
    return seen


ONE_BLIND = KEYS & torch.tensor([[True], [False], [True], [True]])


def twice(function, **arguments):
    """The value, its gradients, and a product with the Hessian, of a loss that weighs every element."""
    values = [each.requires_grad_() for each in inputs()]
    mask = arguments.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        values.append(mask.clone().requires_grad_())
        arguments["attn_mask"] = values[-1]
    generator = torch.Generator().manual_seed(1)
    with sdpa_kernel(SDPBackend.MATH):
        output = function(*values[:3], **arguments)
        weights = torch.arange(output.numel()).view_as(output)
        gradients = torch.autograd.grad((output.sin() * weights).sum(), values, create_graph=True)
        along = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in values]
        return output, gradients, torch.autograd.grad(gradients, values, along)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"attn_mask": KEYS},
        {"attn_mask": ONE_BLIND},
        {"attn_mask": torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)},
        {"attn_mask": torch.zeros(1, 5, dtype=torch.float64).masked_fill(~KEYS[0], -torch.inf)},
        {"scale": 0.3},
        {"dropout_p": 0.0, "is_causal": True, "scale": 2.0},
    ],
)
def test_values_and_both_derivatives_are_torchs(arguments):
    torch.testing.assert_close(twice(attention, **arguments), twice(F.scaled_dot_product_attention, **arguments))


def test_heads_that_share_keys():
    arguments = {"enable_gqa": True, "attn_mask": KEYS}
    found = attention(*inputs(6, 2), **arguments)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*inputs(6, 2), **arguments))


def test_dropout_draws_what_torchs_own_draws():
    found = []
    for function in (attention, F.scaled_dot_product_attention):
        torch.manual_seed(0)
        with sdpa_kernel(SDPBackend.MATH):
            found.append(function(*inputs(), dropout_p=0.5))
    torch.testing.assert_close(*found)
    assert not torch.allclose(found[0], attention(*inputs()))


@pytest.mark.parametrize("with_numbers", [False, True])
def test_a_row_without_any_key_is_torchs_own_and_has_finite_derivatives(with_numbers):
    mask = KEYS.clone()
    mask[1] = False
    if with_numbers:
        mask = torch.randn(4, 5, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    query, key, value = inputs()

    def loss(query):
        return attention(query, key, value, attn_mask=mask).square().sum()

    gradient, product = jvp(grad(loss), (query,), (torch.ones_like(query),))
    assert gradient.isfinite().all()
    assert product.isfinite().all()
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(attention(query, key, value, attn_mask=mask), expected)


def test_it_takes_the_place_of_torchs_own_inside_only(calls):
    with plain_attention():
        found = F.scaled_dot_product_attention(*inputs(), is_causal=True)
        assert torch.equal(torch.ones(2).cumsum(0), torch.tensor([1.0, 2.0])), "everything else is as it was"
    assert calls == [{"is_causal": True}]
    torch.testing.assert_close(F.scaled_dot_product_attention(*inputs(), is_causal=True), found)
    assert len(calls) == 1


def test_it_takes_its_place_in_the_layers_of_torch(calls):
    layer = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    expected = layer(x, x, x, need_weights=False)[0]
    with plain_attention():
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)
    assert len(calls) == 1
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_it_is_differentiated_twice_under_autocast(calls):
    torch.manual_seed(0)
    model = nn.Linear(6, 18)
    x = torch.randn(3, 5, 6)

    def loss(params):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            query, key, value = functional_call(model, params, (x,)).unsqueeze(1).chunk(3, dim=-1)
            return F.scaled_dot_product_attention(query, key, value, is_causal=True).float().square().mean()

    def exact(params):
        query, key, value = functional_call(model, params, (x,)).unsqueeze(1).chunk(3, dim=-1)
        return attention(query, key, value, is_causal=True).square().mean()

    params = {name: param.detach() for name, param in model.named_parameters()}
    ones = {name: torch.ones_like(param) for name, param in params.items()}
    with plain_attention():
        gradient = grad(loss)(params)
        along = jvp(grad(loss), (params,), (ones,))
    assert len(calls) == 2
    for found, true in zip(
        (gradient, *along), (grad(exact)(params), *jvp(grad(exact), (params,), (ones,))), strict=True
    ):
        for name in params:
            assert (found[name] - true[name]).norm() < 0.02 * true[name].norm()


def test_threads_leave_torchs_function_as_it_was():
    before = F.scaled_dot_product_attention
    inside = threading.Barrier(2, timeout=0.2)

    def enter():
        with plain_attention(), suppress(threading.BrokenBarrierError):
            inside.wait()  # the other thread cannot come, because it waits outside

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside.broken
    assert F.scaled_dot_product_attention is before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA's autocast casts in softmax itself")
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cross_entropy"])
def test_softmax_of_half_precision_has_tangents_of_its_own_dtype(name):
    targets = (torch.zeros(3, dtype=torch.long, device="cuda"),) if name == "cross_entropy" else (-1,)

    def loss(weight):
        with torch.autocast("cuda", torch.bfloat16):
            return getattr(F, name)(torch.ones(3, 4, device="cuda") @ weight, *targets).square().sum()

    weight = torch.randn(4, 5, device="cuda")
    with plain_attention():
        product = jvp(grad(loss), (weight,), (torch.ones_like(weight),))[1]
    assert product.dtype == torch.float32
