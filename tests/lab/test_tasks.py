"""What holds for every task, on tiny data."""

import math
from functools import partial
from operator import itemgetter

import pytest
import torch
from small_tasks import SMALL, alike, load
from tiny_data import WRITERS
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from adahessian.base.batches import map_tensors
from adahessian.lab.configs import PRESETS, find_preset
from adahessian.lab.errors import ConfigError
from adahessian.lab.models.resnet import ResNet18
from adahessian.lab.tasks import images
from adahessian.lab.tasks.task import split_holdout
from adahessian.lab.training.optimizers import build_optimizer
from adahessian.lab.training.steps import make_step

# One task per family, or per way to read data.
FAMILIES = ["digits", "digits-mlp", "cifar10-resnet20", "image-folder-resnet18", "imagenet-resnet18", "multi30k-de-en"]
FAMILIES += ["ptb-tensorized", "ptb-transformer", "gpt-chars", "gpt-novels", "glue-sst2", "glue-stsb", "criteo-dlrm"]
FAMILIES += ["pinn-poisson-1d", "pinn-poisson-2d"]
WITH_HOLDOUT = ["digits", "cifar10-resnet20", "image-folder-resnet18", "glue-sst2", "criteo-dlrm"]
# The same rows in the same order, in every epoch.
WITHOUT_ORDER = ["criteo-dlrm", "pinn-poisson-1d", "pinn-poisson-2d"]


@pytest.fixture(autouse=True)
def _narrow_network(monkeypatch):
    monkeypatch.setattr(images, "ResNet18", partial(ResNet18, width=4))


@pytest.fixture(scope="session")
def data_of(tmp_path_factory):
    """A function that returns the folder with a task's data."""
    folders = {}

    def data_of(name):
        write = WRITERS[name]
        if write not in folders:
            folders[write] = tmp_path_factory.mktemp("data")
            if write is not None:
                write(folders[write])
        return folders[write]

    return data_of


def without_dropout(name):
    options = vars(find_preset(name).config("adagrad" if name == "criteo-dlrm" else "adamw").task)
    return {option: 0.0 for option in options if "dropout" in option}


def labels_of(batch):
    return batch["labels"] if isinstance(batch, dict) else batch[-1]


def in_float64(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_are_a_function_of_seed_epoch_and_number(name, data_of):
    task = load(name, data_of(name))
    before = torch.get_rng_state()
    expected = list(task.batches(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(expected) == task.steps_per_epoch > 0
    assert alike(list(load(name, data_of(name)).batches(2)), expected)
    for skip in {1, len(expected) // 2, len(expected) - 1, len(expected)}:
        assert alike(list(task.batches(2, skip)), expected[skip:])
    if name not in WITHOUT_ORDER:
        assert not alike(list(task.batches(3)), expected)
        assert not alike(list(load(name, data_of(name), seed=4).batches(2)), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_share_every_batch(name, data_of):
    whole = load(name, data_of(name))
    parts = [load(name, data_of(name), rank=rank, ranks=2) for rank in range(2)]
    assert parts[0].steps_per_epoch == parts[1].steps_per_epoch <= whole.steps_per_epoch
    shares = [[labels_of(batch) for batch in part.batches(1)] for part in parts]
    assert len(shares[0]) == len(shares[1]) == parts[0].steps_per_epoch
    # A batch that is too small for all ranks is left out. Batches of translations are shuffled without it.
    batches = [labels_of(batch) for batch in whole.batches(1)]
    for one, other, batch in zip(*shares, batches, strict=len(batches) == len(shares[0])):
        assert len(one) == len(other) == len(batch) // 2
        assert torch.equal(torch.cat((one, other)), batch[: 2 * len(one)])


@pytest.mark.parametrize("name", FAMILIES)
def test_products_with_the_hessian_agree(name, data_of):
    task = load(name, data_of(name), **without_dropout(name))
    model, batch = task.build_model().double().train(), map_tensors(in_float64, next(task.batches(0)))
    params = {key: param.detach() for key, param in model.named_parameters() if key != "embeddings.weight"}
    probe = {key: torch.randn_like(param) for key, param in params.items()}
    buffers = dict(model.named_buffers())

    def loss(params):
        state = {**params, **{key: buffer.clone() for key, buffer in buffers.items()}}
        return task.loss(lambda *args, **kwargs: functional_call(model, state, args, kwargs), batch)

    leaves = {key: param.clone().requires_grad_() for key, param in params.items()}
    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(loss(leaves), [*leaves.values()], create_graph=True, materialize_grads=True)
        expected = torch.autograd.grad(gradients, [*leaves.values()], [*probe.values()], materialize_grads=True)
        _, found = jvp(grad(loss), (params,), (probe,))
    scale = torch.cat([product.flatten() for product in expected]).norm()
    assert scale > 1e-3
    for key, product in zip(params, expected, strict=True):
        assert (found[key] - product).norm() <= 1e-8 * scale


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_one_graph_and_a_mean(name, data_of):
    task = load(name, data_of(name), **without_dropout(name))
    model, batch = task.build_model().eval(), next(task.batches(0))
    compiled = torch.compile(task.loss, fullgraph=True, backend="eager")(model, batch)
    torch.testing.assert_close(compiled, task.loss(model, batch))
    torch._dynamo.reset()
    if name != "multi30k-de-en":  # its mean is over tokens
        half = len(labels_of(batch)) // 2
        parts = (slice(0, half), slice(half, 2 * half), slice(0, 2 * half))
        one, other, both = (task.loss(model, map_tensors(itemgetter(part), batch)) for part in parts)
        torch.testing.assert_close(both, (one + other) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_evaluations_have_the_metrics_of_the_config(name, data_of):
    # The large vocabulary would take long.
    config = find_preset(name).config("adamw" if name == "wikitext103-tensorized" else "adahessian-kron")
    task = load(name, data_of(name))
    model, batch = task.build_model(), next(task.batches(0))
    assert model.training
    optimizer = build_optimizer(config.optimizer, model, seed=0)
    step, _ = make_step(model, task.loss, optimizer, config.optimizer, compiled=False)
    assert step(batch).isfinite()
    before = torch.get_rng_state()
    with torch.no_grad():
        found, final = (task.evaluate(model.eval(), final=each) for each in (False, True))
        assert task.evaluate(model) == pytest.approx(found, nan_ok=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert config.task.validation_metric.name in found
    assert {config.task.metric.name, config.task.validation_metric.name} <= {*final}
    assert all(isinstance(value, float) and not math.isinf(value) for value in final.values())


@pytest.mark.parametrize("name", WITH_HOLDOUT)
def test_examples_that_are_held_out_are_not_trained_on(name, data_of):
    options = {"cache_gib": 0.0} if name == "image-folder-resnet18" else {}
    whole, task = (load(name, data_of(name), holdout=holdout, **options) for holdout in (0, 5))
    model = task.build_model().eval()
    with torch.no_grad():
        found, final = task.evaluate(model), task.evaluate(model, final=True)
    assert found
    assert all(key.startswith("validation_") for key in found)
    assert any(key.startswith(("test_", "dev_")) for key in final)

    def seen(task):
        if name == "image-folder-resnet18":
            return {*task.parts["training"]._files}
        if name == "cifar10-resnet20":
            return set(map(bytes, task.parts["training"].images.flatten(1).numpy()))
        batches = [batch for epoch in range(12) for batch in task.batches(epoch)]
        inputs = [batch["input_ids"] if isinstance(batch, dict) else batch[0] for batch in batches]
        return {tuple(row) for each in inputs for row in each.flatten(1).tolist()}

    assert seen(task) < seen(whole)
    assert len(seen(whole)) - len(seen(task)) == 5


def test_the_split_of_the_holdout_is_fixed():
    kept, held_out = split_holdout(20, 6)
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(20))
    torch.manual_seed(7)
    assert torch.equal(split_holdout(20, 6)[1], held_out)
    assert split_holdout(20, 0)[0].tolist() == list(range(20))
    with pytest.raises(ConfigError, match="--holdout 20"):
        split_holdout(20, 20)


def test_no_task_is_left_out():
    assert {*PRESETS} == {*WRITERS}
    assert {*SMALL} <= {*PRESETS}


@pytest.mark.parametrize("dimensions", [1, 2])
def test_the_exact_solution_solves_the_equation(dimensions):
    task = load(f"pinn-poisson-{dimensions}d")
    points, force = next(task.batches(0))
    second = vmap(hessian(lambda x: task.exact(x[None])[0][0]))(points)
    torch.testing.assert_close(-second.diagonal(dim1=1, dim2=2).sum(1), force)
    assert points.dtype == force.dtype == torch.float64
    assert points.abs().max() < 1
    assert (task._boundary.abs().amax(1) == 1).all()
    assert task.exact(task._boundary)[0].abs().max() < 1e-14

    def predict(points, shift=0.0, factor=1.0):
        solution, force = task.exact(points)
        return solution + shift, None, -factor * force

    batch = points, force
    assert task.loss(predict, batch) < 1e-25
    assert task.evaluate(predict)["relative_error"] == 0
    # The boundary excludes other solutions of the equation.
    assert task.loss(lambda points: predict(points, shift=1.0), batch) > 1
    assert task.loss(lambda points: predict(points, factor=0.0), batch) == pytest.approx(1, rel=0.5)
