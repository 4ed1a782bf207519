"""Sparse embeddings: two optimizers that are seen as one."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

from adahessian import AdaHessian, CapturedStep, Curvature, CurvatureError, DenseAndSparse, GaussNewton, param_groups

SETTINGS = {"lr": 0.05, "block_size": 3, "update_every": 3, "warmup_steps": 1, "weight_decay": 0.1, "eps": 0.01}
OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "sparse_adam": torch.optim.SparseAdam}
both = pytest.mark.parametrize("sparse", list(OPTIMIZERS))


class Ranker(nn.Module):
    """A small DLRM: a table for words, a bag for tags, dense features, and layers on top of all."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 4, sparse=True)
        self.features = nn.Linear(3, 4)
        self.tags = nn.EmbeddingBag(9, 4, mode="sum", sparse=True)
        self.norm = nn.LayerNorm(4)
        self.top = nn.Linear(4, 2)
        self.to(dtype)

    def forward(self, batch):
        word, tags, features, _ = batch
        return self.top(torch.tanh(self.norm(self.words(word) + self.tags(tags) + self.features(features))))


def make_batch(seed=1, examples=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(12, (examples,), generator=generator),  # words 12 to 19 never occur
        torch.randint(9, (examples, 2), generator=generator),
        torch.randn(examples, 3, generator=generator).to(dtype),
        torch.randint(2, (examples,), generator=generator),
    )


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch), batch[-1])


def train(model, optimizer, steps=6, start=0, dtype=torch.float32):
    curvature = Curvature(model, loss_fn, optimizer)
    for number in range(start, start + steps):
        batch = make_batch(number, dtype=dtype)
        curvature.measure(batch)
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


def values(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def check_same(state_dict, other):
    torch.testing.assert_close(state_dict["state"], other["state"], rtol=0, atol=0)
    assert state_dict["param_groups"] == other["param_groups"]


def through_a_file(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# The same as two optimizers ------------------------------------------------------------------------------------------


class Apart:
    """What a user without this class writes: both optimizers by hand."""

    def __init__(self, model, sparse, **settings):
        tables = [model.words.weight, model.tags.weight]
        dense = [param for param in model.parameters() if not any(param is table for table in tables)]
        self.dense = AdaHessian(dense, blocks="row", **settings)
        self.sparse = OPTIMIZERS[sparse](tables, lr=0.02)

    def zero_grad(self):
        self.dense.zero_grad()
        self.sparse.zero_grad()

    def step(self):
        self.dense.step()
        self.sparse.step()


@both
@pytest.mark.parametrize("product", ["double_backward", "forward_over_reverse"])
def test_it_is_both_optimizers(sparse, product):
    model, twin = Ranker(), Ranker()
    together = DenseAndSparse(model, sparse=sparse, sparse_lr=0.02, **SETTINGS)
    apart = Apart(twin, sparse, **SETTINGS)
    untouched = model.words.weight[12:].detach().clone()
    for each, optimizer, measured in ((model, together, together), (twin, apart, apart.dense)):
        curvature = Curvature(each, loss_fn, measured, product=product)
        for number in range(7):
            batch = make_batch(number)
            curvature.measure(batch)
            optimizer.zero_grad()
            loss_fn(each, batch).backward()
            optimizer.step()
    assert torch.equal(values(model), values(twin))
    assert not torch.equal(values(model), values(Ranker()))
    assert torch.equal(model.words.weight[12:], untouched)


@both
@pytest.mark.parametrize("way", ["graph", "closure"])
def test_the_classic_ways_give_the_same_update(sparse, way):
    model, twin = Ranker(), Ranker()
    optimizer, other = (DenseAndSparse(each, sparse=sparse, **SETTINGS) for each in (model, twin))
    returned = []
    for number in range(5):
        train(model, optimizer, 1, start=number)

        def closure(number=number):
            assert torch.is_grad_enabled()
            other.zero_grad()
            loss = loss_fn(twin, make_batch(number))
            loss.backward(create_graph=other.curvature_due)
            returned.append(loss)
            return loss

        if way == "graph":
            closure()
            other.step()
        else:
            with torch.no_grad():
                assert other.step(closure) is returned[-1]
    assert len(returned) == 5
    torch.testing.assert_close(values(model), values(twin))


def test_the_classic_way_leaves_no_cycle():
    model = Ranker()
    optimizer = DenseAndSparse(model, **SETTINGS)
    gc.disable()
    try:
        loss = loss_fn(model, make_batch())
        loss.backward(create_graph=True)
        node = weakref.ref(model.words.weight.grad)
        optimizer.step()
        assert not any(param.grad.requires_grad for param in model.parameters())
        assert node() is None
    finally:
        gc.enable()


def test_gauss_newton_measures_the_dense_layers():
    model, twin = Ranker(), Ranker()
    optimizer = DenseAndSparse(model, sparse_lr=0.02, **SETTINGS)
    apart = Apart(twin, "adagrad", **SETTINGS)
    for each, both_of, measured in ((model, optimizer, optimizer), (twin, apart, apart.dense)):
        curvature = GaussNewton(each, lambda m, batch: m(batch), measured)
        for number in range(4):
            assert curvature.measure(make_batch(number)) == (number in (0, 3))
            both_of.zero_grad()
            loss_fn(each, make_batch(number)).backward()
            both_of.step()
    assert torch.equal(values(model), values(twin))


def test_settings_reach_both_sides():
    model = Ranker()
    optimizer = DenseAndSparse(
        model, 0.3, betas=(0.8, 0.9), weight_decay=0.1, decay_bias_and_norm=False, maximize=True,
        sparse_lr=0.02, sparse_settings={"initial_accumulator_value": 0.1, "lr_decay": 0.5},
    )  # fmt: skip
    decaying, exempt, tables = optimizer.param_groups
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3, 0.02]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0, 0]
    assert all(group["maximize"] for group in optimizer.param_groups)
    assert decaying["param_names"] == ["features.weight", "top.weight"]
    assert exempt["param_names"] == ["features.bias", "norm.weight", "norm.bias", "top.bias"]
    assert tables["param_names"] == ["words.weight", "tags.weight"]
    assert decaying["betas"] == (0.8, 0.9)
    assert tables["lr_decay"] == 0.5
    assert optimizer.state[model.tags.weight]["sum"].eq(0.1).all()
    assert optimizer.num_probes == 1
    assert optimizer.dropped_measurements == 0
    assert isinstance(optimizer.dense, AdaHessian)
    assert not hasattr(optimizer, "_measurement")
    assert not hasattr(optimizer, "no_such_thing")
    assert not hasattr(DenseAndSparse.__new__(DenseAndSparse), "num_probes")


@both
def test_maximize_climbs(sparse):
    model, batch = Ranker(), make_batch()
    optimizer = DenseAndSparse(model, lr=0.0, sparse=sparse, sparse_lr=0.01, maximize=True)
    before = loss_fn(model, batch).item()
    for _ in range(5):
        optimizer.feed_curvature({param: torch.ones_like(param) for param in optimizer.measured_parameters()})
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    assert loss_fn(model, batch).item() > before


# The model is split --------------------------------------------------------------------------------------------------


def test_shared_embeddings_appear_once():
    model = Ranker()
    model.again = nn.Embedding(20, 4, sparse=True)
    model.again.weight = model.words.weight
    optimizer = DenseAndSparse(model)
    assert len(optimizer.sparse.param_groups[0]["params"]) == 2
    listed = [param for group in optimizer.param_groups for param in group["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, model.parameters()))


def test_dense_embeddings_stay_with_adahessian():
    model = Ranker()
    model.positions = nn.Embedding(5, 4)
    optimizer = DenseAndSparse(model)
    assert any(param is model.positions.weight for param in optimizer.measured_parameters())


def test_models_that_need_no_split_are_named():
    with pytest.raises(ValueError, match=r"no nn\.Embedding or nn\.EmbeddingBag with sparse=True: .*AdaHessian"):
        DenseAndSparse(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1)))
    with pytest.raises(ValueError, match=r"nothing but sparse embeddings.*Adagrad"):
        DenseAndSparse(nn.Embedding(3, 2, sparse=True))
    with pytest.raises(TypeError, match="param_groups takes"):
        DenseAndSparse(Ranker().parameters())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"sparse": "sgd"}, ValueError, "Invalid sparse value: 'sgd'. It must be one of adagrad, sparse_adam"),
        ({"sparse_lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        (
            {"sparse_settings": {"weight_decay": 0.1}},
            TypeError,
            "has weight_decay, but of adagrad it may",
        ),
        ({"sparse_settings": {"lr": 0.1}}, TypeError, "the learning rate is sparse_lr"),
        ({"sparse": "sparse_adam", "sparse_settings": {"lr_decay": 0.1}}, TypeError, "it may have betas, eps"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        ({"momentum": 0.9}, TypeError, "momentum"),
    ],
)
def test_wrong_settings_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        DenseAndSparse(Ranker(), **settings)


@both
def test_a_weight_shared_with_a_dense_layer(sparse):
    """Its gradient is dense: Adagrad takes that, SparseAdam does not."""
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 5))
    model[1].weight = model[0].weight
    optimizer = DenseAndSparse(model, sparse=sparse)
    optimizer.feed_curvature({model[1].bias: torch.ones(5)})
    model(torch.tensor([0, 2])).square().mean().backward()
    before = values(model)
    if sparse == "adagrad":
        optimizer.step()
        assert values(model).ne(before).all()
    else:
        with pytest.raises(RuntimeError, match='take sparse="adagrad"'):
            optimizer.step()
        assert torch.equal(values(model), before)


# What torch asks of an optimizer -------------------------------------------------------------------------------------

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)]),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=9),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [0.01, 0.001], [0.1, 0.01], step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[group["lr"] for group in o.param_groups], total_steps=9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@both
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_reach_both_sides(sparse, name):
    model = Ranker()
    optimizer = DenseAndSparse(model, lr=0.05, eps=0.01, sparse=sparse, sparse_lr=0.01)
    scheduler = SCHEDULERS[name](optimizer)
    seen = []
    for number in range(8):
        seen.append([group["lr"] for group in optimizer.param_groups])
        train(model, optimizer, 1, start=number)
        scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
    dense, tables = zip(*seen, strict=True)
    assert len(set(dense)) > 1
    assert len(set(tables)) > 1
    if name in ("CyclicLR", "OneCycleLR"):
        assert optimizer.dense.param_groups[0]["betas"][0] != 0.9
    # The optimizers inside work with what the scheduler has set.
    assert optimizer.dense.param_groups[0] is optimizer.param_groups[0]
    assert optimizer.sparse.param_groups[0] is optimizer.param_groups[1]


@both
def test_a_learning_rate_of_zero_stops_each_side(sparse):
    model = Ranker()
    optimizer = DenseAndSparse(model, lr=0.05, eps=0.01, sparse=sparse)
    for still in (0, 1):
        lrs = [group["lr"] for group in optimizer.param_groups]
        optimizer.param_groups[still]["lr"] = 0.0
        before = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]
        train(model, optimizer, 1)
        for number, group in enumerate(optimizer.param_groups):
            pairs = zip(group["params"], before[number], strict=True)
            assert all(torch.equal(param, old) for param, old in pairs) == (number == still)
            group["lr"] = lrs[number]


def test_hooks_run_once_a_step():
    model, calls = Ranker(), []
    optimizer = DenseAndSparse(model, **SETTINGS)
    optimizer.register_step_pre_hook(lambda o, *_: calls.append(("before", o)))
    handle = optimizer.register_step_post_hook(lambda o, *_: calls.append(("after", o)))
    train(model, optimizer, 1)
    handle.remove()
    train(model, optimizer, 1)
    assert calls == [("before", optimizer), ("after", optimizer), ("before", optimizer)]


@both
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_reaches_both_sides(sparse, set_to_none):
    model = Ranker()
    optimizer = DenseAndSparse(model, sparse=sparse, eps=1.0)
    train(model, optimizer, 1)
    optimizer.zero_grad(set_to_none=set_to_none)
    gradients = [param.grad for param in model.parameters()]
    if set_to_none:
        assert gradients == [None] * 8
    else:
        assert all(gradient.to_dense().eq(0).all() for gradient in gradients)
        loss_fn(model, make_batch()).backward()
        optimizer.step()


def test_dense_gradients_can_be_clipped():
    model = Ranker()
    optimizer = DenseAndSparse(model)
    loss_fn(model, make_batch()).backward()
    table = model.words.weight.grad.to_dense()
    nn.utils.clip_grad_norm_(optimizer.measured_parameters(), 1e-3)
    assert nn.utils.get_total_norm([param.grad for param in optimizer.measured_parameters()]) < 1.01e-3
    assert torch.equal(model.words.weight.grad.to_dense(), table)


@both
def test_grad_scaler_scales_both_sides_and_skips_both(sparse):
    model, twin = Ranker(), Ranker()
    optimizer, other = (DenseAndSparse(each, sparse=sparse, **SETTINGS) for each in (model, twin))
    train(twin, other, 1)
    # A power of two: scaling and unscaling keep every bit.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    Curvature(model, loss_fn, optimizer).measure(make_batch(0))
    scaler.scale(loss_fn(model, make_batch(0))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(values(model), values(twin))

    optimizer.zero_grad()
    scaler.scale(loss_fn(model, make_batch(1)) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert torch.equal(values(model), values(twin))


@both
def test_groups_can_be_added_to_each_side(sparse):
    model = Ranker()
    optimizer = DenseAndSparse(model, sparse=sparse, lr=0.05, eps=0.01)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    table, head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)
    optimizer.add_param_group({"params": [("new.weight", table.weight)], "sparse": True, "lr": 0.5})
    optimizer.add_param_group({"params": head.named_parameters("head"), "block_size": 2})
    assert [group["sparse"] for group in optimizer.param_groups] == [False, True, True, False]
    before = values(nn.ModuleList([table, head]))

    def loss(model, batch):
        return loss_fn(model, batch) + nn.functional.cross_entropy(head(table(batch[0])), batch[-1])

    def go_on(model, optimizer, table, head):
        curvature = Curvature(nn.ModuleList([model, table, head]), lambda m, batch: loss(m[0], batch), optimizer)
        for number in range(3):
            curvature.measure(make_batch(number))
            optimizer.zero_grad()
            loss(model, make_batch(number)).backward()
            optimizer.step()

    go_on(model, optimizer, table, head)
    scheduler.step()
    after = values(nn.ModuleList([table, head]))
    assert torch.equal(after[48:80], before[48:80])  # the rows of words that never occur
    assert after[80:].ne(before[80:]).all()
    assert after[:48].ne(before[:48]).any()
    assert set(map(id, optimizer.state)) == {id(p) for group in optimizer.param_groups for p in group["params"]}
    saved = copy.deepcopy(optimizer.state_dict())
    go_on(model, optimizer, table, head)
    optimizer.load_state_dict(saved)
    check_same(optimizer.state_dict(), saved)


def test_groups_that_do_not_fit_are_refused():
    model = Ranker()
    optimizer = DenseAndSparse(model)
    for group, error, message in (
        ({"params": [("again", model.words.weight)]}, ValueError, "more than one parameter group"),
        ({"params": [("again", model.top.bias)], "sparse": True}, ValueError, "more than one parameter group"),
        ({"params": [("new", torch.ones(3))], "lr": -1.0}, ValueError, "Invalid learning rate"),
        ("no group", TypeError, "must be a dict"),
    ):
        with pytest.raises(error, match=message):
            optimizer.add_param_group(group)
    assert [group["sparse"] for group in optimizer.param_groups] == [False, True]
    assert optimizer.dense.param_groups == optimizer.param_groups[:1]
    assert optimizer.sparse.param_groups == optimizer.param_groups[1:]


@both
def test_a_step_without_curvature_moves_neither_side(sparse):
    model = Ranker()
    optimizer = DenseAndSparse(model, sparse=sparse)
    before, state = values(model), copy.deepcopy(optimizer.state_dict()["state"])
    loss_fn(model, make_batch()).backward()
    with pytest.raises(CurvatureError, match="no curvature has been measured yet"):
        optimizer.step()
    assert torch.equal(values(model), before)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


def test_decay_of_an_embedding_is_refused_before_anything_moves():
    model = Ranker()
    optimizer = DenseAndSparse(model, **SETTINGS)
    optimizer.param_groups[-1]["weight_decay"] = 0.1
    before = values(model)
    with pytest.raises(RuntimeError, match="cannot decay"):
        train(model, optimizer, 1)
    assert torch.equal(values(model), before)


# State and checkpoints -----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_exact(sparse, steps_before, dtype):
    model = Ranker(dtype)
    optimizer = DenseAndSparse(model, sparse=sparse, sparse_lr=0.02, **SETTINGS)
    train(model, optimizer, steps_before, dtype=dtype)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, 6, start=steps_before, dtype=dtype)

    resumed = Ranker(dtype)
    other = DenseAndSparse(resumed, sparse=sparse)  # the file brings its own settings
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(resumed, other, 6, start=steps_before, dtype=dtype)
    assert torch.equal(values(resumed), values(model))
    check_same(other.state_dict(), optimizer.state_dict())


def test_the_state_has_the_format_of_torch():
    model = Ranker()
    optimizer = DenseAndSparse(model, **SETTINGS)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"}
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert set(saved["state"]) == set(range(8))
    assert set(saved["state"][0]) == {"step", "exp_avg", "hessian_rms", "hessian_age", "dropped"}
    assert set(saved["state"][7]) == {"step", "sum"}


@both
@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("steps_before", [0, 4])
def test_deep_copies_and_pickles_go_on_alike(sparse, copy_of, steps_before):
    model = Ranker()
    optimizer = DenseAndSparse(model, sparse=sparse, **SETTINGS)
    train(model, optimizer, steps_before)
    twin, other = copy_of((model, optimizer))
    scheduler = lr_scheduler.ExponentialLR(other, 0.5)
    train(model, optimizer, start=steps_before)
    train(twin, other, start=steps_before)
    assert torch.equal(values(model), values(twin))
    torch.testing.assert_close(optimizer.state_dict()["state"], other.state_dict()["state"], rtol=0, atol=0)
    scheduler.step()
    assert other.sparse.param_groups[0]["lr"] == optimizer.sparse.param_groups[0]["lr"] / 2


@both
@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoints(sparse, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, untouched = Ranker(), Ranker()
    optimizer = DenseAndSparse(model, sparse=sparse, **SETTINGS)
    fresh = get_optimizer_state_dict(model, optimizer, options=options)
    assert torch.equal(values(model), values(untouched))
    train(model, optimizer, 4)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    # What is loaded in place must be there from the start.
    assert (fresh if flatten else fresh["state"]).keys() == (saved if flatten else saved["state"]).keys()

    resumed = Ranker()
    other = DenseAndSparse(resumed, sparse=sparse, **SETTINGS)
    resumed.load_state_dict(model.state_dict())
    set_optimizer_state_dict(resumed, other, saved, options=options)
    train(model, optimizer, start=4)
    train(resumed, other, start=4)
    assert torch.equal(values(model), values(resumed))


def test_a_checkpoint_of_a_fresh_optimizer_changes_no_run():
    model, twin = Ranker(), Ranker()
    optimizer, other = (DenseAndSparse(each, sparse="sparse_adam", **SETTINGS) for each in (model, twin))
    get_optimizer_state_dict(model, optimizer)
    train(model, optimizer)
    train(twin, other)
    assert torch.equal(values(model), values(twin))


def larger_table(model):
    model.words = nn.Embedding(21, 4, sparse=True)


def larger_layer(model):
    model.top = nn.Linear(4, 3)


def another_table(model):
    model.more = nn.Embedding(20, 4, sparse=True)


@pytest.mark.parametrize("change", [larger_table, larger_layer, another_table])
@both
def test_state_of_another_model_is_refused_whole(sparse, change):
    model, foreign = Ranker(), Ranker()
    change(foreign)
    check_refused(model, DenseAndSparse(model, sparse=sparse), DenseAndSparse(foreign, sparse=sparse, lr=0.9))


def test_state_of_another_optimizer_is_refused_whole():
    model = Ranker()
    adahessian = AdaHessian(param_groups(model))
    apart = DenseAndSparse(Ranker(), sparse="sparse_adam", lr=0.9)
    for foreign in (adahessian, torch.optim.Adagrad(model.parameters()), apart):
        check_refused(model, DenseAndSparse(model), foreign)


def check_refused(model, optimizer, foreign):
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"load one that DenseAndSparse has saved|load a checkpoint of this model"):
        optimizer.load_state_dict(foreign.state_dict())
    check_same(optimizer.state_dict(), before)


def test_state_dict_hooks_see_the_whole():
    model = Ranker()
    optimizer = DenseAndSparse(model, **SETTINGS)
    train(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())

    def double(_, state_dict):
        state_dict = copy.deepcopy(state_dict)
        state_dict["state"][6]["sum"] *= 2
        return state_dict

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(lambda o: o.state[model.top.bias]["exp_avg"].fill_(7))
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[model.words.weight]["sum"], 2 * saved["state"][6]["sum"])
    assert optimizer.dense.state[model.top.bias]["exp_avg"].eq(7).all()


def test_a_layer_that_thaws_after_loading_has_its_state_seen():
    model = Ranker()
    model.features.requires_grad_(False)
    optimizer = DenseAndSparse(model, **SETTINGS)
    train(model, optimizer, 1)
    assert model.features.weight not in optimizer.state
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.features.requires_grad_(True)
    train(model, optimizer, 4)
    assert set(optimizer.state_dict()["state"]) == set(range(8))


# Several processes ---------------------------------------------------------------------------------------------------


def test_a_captured_step_would_leave_the_tables_out():
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 2))
    curvature = Curvature(model, lambda model, x: model(x).square().mean(), DenseAndSparse(model))
    with pytest.raises(ValueError, match="DenseAndSparse's: write the loop out"):
        CapturedStep(curvature)
