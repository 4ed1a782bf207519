"""Sparse embedding tables as groups of one optimizer: Adagrad for the tables, AdaHessian for everything else."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Adagrad, lr_scheduler

from adahessian import AdaHessian, Curvature, CurvatureError, param_groups

OPTIONS = {"lr": 0.05, "block_size": 3, "curvature_every": 3, "curvature_warmup": 1, "eps": 0.01}


class Ranker(nn.Module):
    """A small DLRM: a table for words, a bag for tags, dense features, and layers on top of all."""

    def __init__(self, dtype=torch.float32, words=20):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, 4, sparse=True)
        self.features = nn.Linear(3, 4)
        self.tags = nn.EmbeddingBag(9, 4, mode="sum", sparse=True)
        self.norm = nn.LayerNorm(4)
        self.top = nn.Linear(4, 2)
        self.to(dtype)

    def forward(self, batch):
        word, tags, features, _ = batch
        return self.top(torch.tanh(self.norm(self.words(word) + self.tags(tags) + self.features(features))))


def make_batch(seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(12, (8,), generator=generator),  # words 12 to 19 never occur
        torch.randint(9, (8, 2), generator=generator),
        torch.randn(8, 3, generator=generator).to(dtype),
        torch.randint(2, (8,), generator=generator),
    )


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch), batch[-1])


def make(model, **options):
    return AdaHessian(param_groups(model, sparse_lr=0.02), **{**OPTIONS, **options})


def train(model, optimizer, steps=6, start=0, dtype=torch.float32, measured=None, way="object"):
    """Some steps; ``optimizer`` is one or several, of which ``measured`` is the AdaHessian."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    measured = measured or optimizers[0]
    curvature = Curvature(model, loss_fn, measured)
    for number in range(start, start + steps):
        batch = make_batch(number, dtype)
        if way == "object":
            curvature.measure(batch)
        model.zero_grad()
        loss_fn(model, batch).backward(create_graph=way == "graph" and measured.curvature_due)
        for each in optimizers:
            each.step()


def values(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def tables_of(model):
    return [model.words.weight, model.tags.weight]


def apart(model, **options):
    """AdaHessian and torch's Adagrad."""
    tables = tables_of(model)
    dense = [param for param in model.parameters() if not any(param is table for table in tables)]
    maximize = options.get("maximize", False)
    return [AdaHessian(dense, **{**OPTIONS, **options}), Adagrad(tables, lr=0.02, maximize=maximize)]


def check_same(found, expected):
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
    assert found["param_groups"] == expected["param_groups"]


def through_a_file(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("way", ["object", "graph"])
@pytest.mark.parametrize("options", [{}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_trained_as_by_adagrad_bit_by_bit(way, options, sparse, dtype):
    """With sparse gradients and with dense ones, such as those of a table that a dense layer shares."""
    model, twin = Ranker(dtype), Ranker(dtype)
    optimizer, others = make(model, **options), apart(twin, **options)
    for each in (model, twin):
        each.words.sparse = each.tags.sparse = sparse
    train(model, optimizer, dtype=dtype, way=way)
    train(twin, others, dtype=dtype, way=way)
    assert torch.equal(values(model), values(twin))
    assert not torch.equal(model.words.weight[:12], Ranker(dtype).words.weight[:12])
    assert torch.equal(model.words.weight[12:], Ranker(dtype).words.weight[12:])
    for table in tables_of(model):
        assert set(optimizer.state[table]) == {"step", "sum"}
        assert not table.grad.requires_grad


def test_a_model_of_tables_alone_needs_no_curvature():
    table = nn.Embedding(5, 3, sparse=True)
    before = table.weight.detach().clone()
    optimizer = AdaHessian(param_groups(table, sparse_lr=0.1))
    assert not optimizer.curvature_due
    table(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()
    assert table.weight.ne(before).any(1).tolist() == [False, True, True, False, False]


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [0.01, 0.001], [0.1, 0.01], step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[group["lr"] for group in o.param_groups], total_steps=9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_see_all_groups(name):
    model = Ranker()
    optimizer = make(model)
    scheduler = SCHEDULERS[name](optimizer)
    seen = []
    for number in range(8):
        seen.append([group["lr"] for group in optimizer.param_groups])
        train(model, optimizer, 1, start=number)
        scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
    assert [group["sparse"] for group in optimizer.param_groups] == [False, True]
    assert all(len(set(lrs)) > 1 for lrs in zip(*seen, strict=True))


def test_grad_scaler_skips_both_kinds_of_groups():
    model, twin = Ranker(), Ranker()
    optimizer, other = make(model), make(twin)
    train(twin, other, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # a power of two keeps every bit
    Curvature(model, loss_fn, optimizer).measure(make_batch(0))
    for factor in (1.0, torch.inf):
        optimizer.zero_grad()
        scaler.scale(loss_fn(model, make_batch(0)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(values(model), values(twin))


@pytest.mark.parametrize(
    ("option", "name"), [({"weight_decay": 0.1}, "weight_decay"), ({"sparse": False}, "sparse_lr")]
)
def test_bad_input_is_rejected_before_anything_changes(option, name):
    model = Ranker()
    optimizer = make(model)
    train(model, optimizer, 1)
    before, state = values(model), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[-1].update(option)
    loss_fn(model, make_batch()).backward()
    with pytest.raises(RuntimeError, match=name):
        optimizer.step()
    assert torch.equal(values(model), before)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


def test_a_step_without_curvature_moves_no_group():
    model = Ranker()
    optimizer = make(model)
    before = values(model)
    loss_fn(model, make_batch()).backward()
    with pytest.raises(CurvatureError, match="measure"):
        optimizer.step()
    assert torch.equal(values(model), before)
    assert not optimizer.state


@pytest.mark.parametrize("steps_before", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_exact(steps_before, dtype):
    model, resumed = Ranker(dtype), Ranker(dtype)
    optimizer = make(model)
    train(model, optimizer, steps_before, dtype=dtype)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, start=steps_before, dtype=dtype)
    other = AdaHessian(param_groups(resumed, sparse_lr=1.0))  # the file brings its own options
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(resumed, other, start=steps_before, dtype=dtype)
    assert torch.equal(values(resumed), values(model))
    check_same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoints(flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, resumed = Ranker(), Ranker()
    optimizer, other = make(model), make(resumed)
    get_optimizer_state_dict(model, optimizer, options=options)
    assert torch.equal(values(model), values(Ranker())), "saving a fresh optimizer moves nothing"
    train(model, optimizer, 4)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    resumed.load_state_dict(model.state_dict())
    set_optimizer_state_dict(resumed, other, saved, options=options)
    train(model, optimizer, start=4)
    train(resumed, other, start=4)
    assert torch.equal(values(model), values(resumed))


def with_a_larger_table():
    model = Ranker(words=21)
    optimizer = make(model)
    train(model, optimizer, 1)
    return optimizer


def without_sparse_groups():
    return AdaHessian([{**group, "sparse": False} for group in param_groups(Ranker(), sparse_lr=0.02)])


def of_adagrad():
    return Adagrad([{"params": group["params"]} for group in make(Ranker()).param_groups])


@pytest.mark.parametrize("foreign", [with_a_larger_table, without_sparse_groups, of_adagrad])
def test_a_state_that_does_not_fit_is_rejected_whole(foreign):
    model = Ranker()
    optimizer = make(model)
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="state"):
        optimizer.load_state_dict(foreign().state_dict())
    check_same(optimizer.state_dict(), before)
