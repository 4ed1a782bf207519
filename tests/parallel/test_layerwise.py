"""With one FSDP2 module at a time, products match the gathered model, and only one module is in memory."""

import gc
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from ranks import loss_fn, part_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian, AdaHessianKron, Curvature, param_groups
from adahessian.base.log import info_once, warn_once
from adahessian.base.shards import gather, is_sharded, sum_to_shard
from adahessian.hessian.double_backward import double_backward
from adahessian.hessian.isolation import random_state_kept
from adahessian.parallel import layerwise
from adahessian.parallel.fsdp import gathered
from adahessian.parallel.layerwise import LayerwisePass
from adahessian.parallel.ranks import Ranks

WIDTH, WORDS, LENGTH, DEPTH = 8, 11, 5, 3


class Block(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.checkpoints = checkpoints
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def compute(self, x, mask):
        query, key, value = self.attention(self.norm(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        x = x + self.dropout(F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2))
        return {"x": x + self.down(F.gelu(self.up(x)))}

    def forward(self, x, *, mask):
        return checkpoint(self.compute, x, mask, use_reentrant=False) if self.checkpoints else self.compute(x, mask)


class Transformer(nn.Module):
    """A model with a tied embedding, keyword arguments, outputs in dicts, and a block that runs twice."""

    def __init__(self, checkpoints):
        super().__init__()
        self.outside, self.order = checkpoints == "outside", [*range(DEPTH), 0]
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpoints == "inside") for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        x, mask = self.embedding(words), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        for block in map(self.blocks.__getitem__, self.order):
            x = (checkpoint(block, x, mask=mask, use_reentrant=False) if self.outside else block(x, mask=mask))["x"]
        return self.head(x)[:, -1]


class WithGroupNorm(nn.Module):
    """PyTorch has no forward derivative of the gradient of group norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(2, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())


class Wrong(torch.autograd.Function):
    """A square with a wrong forward derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient

    @staticmethod
    def jvp(ctx, tangent):
        return 3 * ctx.saved_tensors[0] * tangent


class WithWrong(WithGroupNorm):
    def forward(self, x):
        return self.last(Wrong.apply(self.first(x)))


def sharded(model):
    for block in getattr(model, "blocks", ()):
        fully_shard(block)
    return fully_shard(model)


def made(kind, *args):
    torch.manual_seed(0)
    return kind(*args).double()


def words(number, size=8):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(WORDS, (size, LENGTH), generator=generator), torch.randint(WORDS, (size,), generator=generator)


def vectors(number, size=8):
    x, y = words(number, size)
    return F.one_hot(x, WORDS).double().flatten(1)[:, :WIDTH] - 0.3 * x[:, :1], y


def train(model, kind, make_batch, rank=0, size=1, batches=3):
    optimizer = kind(param_groups(model), lr=0.01)
    curvature = Curvature(model, loss_fn, optimizer, batch_fraction=1)
    for number in range(batches):
        batch = part_of(make_batch(number), rank, size)
        curvature.measure(batch)
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return torch.cat([gather(param).detach().flatten() for param in model.parameters()]), curvature


# On the ranks ---------------------------------------------------------------------------------------------------------


def products_on_ranks(rank, size, checkpoints):
    model = sharded(made(Transformer, checkpoints))
    request = AdaHessian(model.parameters(), num_probes=2)._begin_measurement()
    batch, weight = part_of(words(0), rank, size), 1.0 + rank
    with random_state_kept(model), gathered(model, request) as whole:
        state = torch.get_rng_state()
        expected = []
        for probe in range(2):  # each with the same dropout masks
            torch.set_rng_state(state)
            one = whole._replace(num_probes=1, draw=lambda _, probe=probe: whole.draw(probe))
            products = double_backward(model, loss_fn, batch, one).products[0]
            expected.append(
                [sum_to_shard(weight * each, param) for each, param in zip(products, request.params, strict=True)]
            )
    found = LayerwisePass(model, loss_fn, Ranks(), needs_marks=True).measure(batch, request, weight)
    torch.testing.assert_close(found.products, expected, rtol=1e-9, atol=1e-11)
    assert all(mark.shape == product.shape for mark, product in zip(found.gradients, found.products[0], strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    return sum(mark.sum().item() for mark in found.gradients)


def sizes_on_ranks(rank, size):
    """Return the number of allocated whole tensors with the shape of one weight, each time a block has run."""
    model = sharded(made(Transformer, "never"))
    model.order, seen = range(DEPTH), []
    shape = model.blocks[0].attention.weight.shape

    def living():
        return [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == shape]

    def count(*_):
        seen.append(len({each.data_ptr() for each in living() if each.untyped_storage().size()}))

    def watch(module, args, output):
        count()
        output["x"].register_hook(count)

    for block in model.blocks:
        block.register_forward_hook(watch)
        block.down.register_forward_hook(count)
    request = AdaHessian(model.parameters())._begin_measurement()
    batch = part_of(words(0), rank, size)
    gc.collect()
    gc.disable()
    try:
        found = LayerwisePass(model, loss_fn, Ranks(), needs_marks=False).measure(batch, request, 1.0)
        assert not living()  # no reference cycle keeps them alive
    finally:
        gc.enable()
    assert all(
        part.shape == param.to_local().shape for part, param in zip(found.products[0], request.params, strict=True)
    )
    assert all(map(is_sharded, model.parameters()))
    return seen


def trained_on_ranks(rank, size, kind, model, make_batch, gathers=False):
    logged, logger, handler = [], logging.getLogger("adahessian"), logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    info_once.cache_clear()
    warn_once.cache_clear()
    choose = LayerwisePass.choose
    if gathers:
        LayerwisePass.choose = lambda *_: False
    try:
        result, curvature = train(sharded(made(*model)), kind, make_batch, rank, size)
    finally:
        LayerwisePass.choose = choose
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return result, curvature._layerwise.works, logged


def failed_on_ranks(rank, size):
    """Check that an infinite or NaN loss decides nothing, and that an error in the loss leaves the model unchanged."""
    model = sharded(made(Transformer, "never"))
    batch = part_of(words(0), rank, size)
    factor = math.nan if rank == 0 else 1.0

    def loss_of(model, batch):
        loss = loss_fn(model, batch) * factor
        if factor == 0:
            raise RuntimeError("broken")
        return loss

    choose = LayerwisePass(model, loss_of, Ranks(), needs_marks=True).choose
    request = AdaHessian(model.parameters())._begin_measurement()
    assert not choose(batch, request)
    factor = 1.0
    assert choose(batch, request)
    factor = 0.0
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    with pytest.raises(RuntimeError, match="broken"):
        choose.__self__.measure(batch, request, 1.0)
    assert hooks == [dict(module._forward_hooks) for module in model.modules()]
    assert all(a is b for a, b in zip(model.parameters(), request.params, strict=True))
    loss_fn(model, batch).backward()


def without_memory_on_ranks(rank, size):
    original = layerwise._fits
    layerwise._fits = lambda params: rank == 0
    try:
        return trained_on_ranks(rank, size, AdaHessian, (Transformer, "never"), words)
    finally:
        layerwise._fits = original


# Here -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoints", ["never", "inside", "outside"])
def test_products_are_those_of_the_gathered_model(two_ranks, checkpoints):
    assert all(marks > 0 for marks in two_ranks(products_on_ranks, checkpoints))


def test_whole_parameters_exist_for_one_module_at_a_time(two_ranks):
    for seen in two_ranks(sizes_on_ranks):
        forward, backward = seen[: 2 * DEPTH], seen[2 * DEPTH :]
        assert forward == [2, 0] * DEPTH  # theta and z while a block runs, and nothing afterwards
        assert backward == [2] * DEPTH


@pytest.mark.parametrize("kind", [AdaHessian, AdaHessianKron])
def test_training_is_that_of_the_gathered_model(two_ranks, kind):
    model = (Transformer, "inside")
    (found, works, logged), (other, *_) = two_ranks(trained_on_ranks, kind, model, words)
    assert works
    assert any("one FSDP2 module at a time" in line for line in logged)
    assert torch.equal(found, other)
    (expected, works, _), _ = two_ranks(trained_on_ranks, kind, model, words, True)
    assert works is None
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("model", [WithGroupNorm, WithWrong])
def test_models_that_do_not_allow_it_are_gathered(two_ranks, model):
    alone, _ = train(made(model), AdaHessian, vectors)
    for found, works, logged in two_ranks(trained_on_ranks, AdaHessian, (model,), vectors):
        assert works is False
        assert sum("gathers the whole sharded model" in line for line in logged) == 1
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-8)


def test_a_failed_pass_leaves_the_model_as_it_was(two_ranks):
    two_ranks(failed_on_ranks)


def test_all_ranks_do_without_the_comparison_if_one_lacks_memory(two_ranks):
    for _, works, logged in two_ranks(without_memory_on_ranks):
        assert works
        assert not any("within" in line for line in logged)
