import math
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits

import adahessian
from adahessian.lab.click_metrics import click_scores
from adahessian.lab.tasks.recommendation import EXPERIMENTS
from adahessian.lab.tasks.task import Place, Share

(EXPERIMENT,) = EXPERIMENTS
ALONE = Share()


def row(number):
    """A row whose first number is its own, with a click where its first category is odd."""
    generator = torch.Generator().manual_seed(number)
    categories = torch.randint(1 << 20, (26,), generator=generator).tolist()
    numbers = [number, *torch.randint(50, (12,), generator=generator).tolist()]
    return "\t".join([str(categories[0] % 2), *map(str, numbers), *(f"{category:08x}" for category in categories)])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "few.txt").write_text("".join(row(number) + "\n" for number in range(80)))
    return folder


@pytest.fixture
def load(data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def task(*, share=ALONE, seed=0, **changes):
        small = {"file": "few.txt", "batch_size": 16, "hash_size": 10, "bottom_layers": (8,), "top_layers": (8,)}
        settings = replace(EXPERIMENT.defaults["adahessian"], **{**small, **changes})
        return EXPERIMENT.load(settings, Place(data_dir=data_dir, device=torch.device("cpu"), seed=seed, share=share))

    return task


def own_numbers(batch):
    return batch[0][:, 0].expm1().round().long().tolist()


def test_an_epoch_is_the_first_six_days_in_their_order(load, monkeypatch):
    monkeypatch.setattr("adahessian.lab.tasks.recommendation._ROWS_AT_ONCE", 32)
    task = load()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    epoch = list(task.batches(0))
    assert torch.equal(torch.rand(3), expected)
    assert [number for batch in epoch for number in own_numbers(batch)] == list(range(69))
    assert [len(batch[2]) for batch in epoch] == [16, 16, 16, 16, 5]
    assert task.steps_per_epoch == 5
    for start in range(6):
        late = list(task.batches(1, start=start))
        assert [own_numbers(batch) for batch in late] == [own_numbers(batch) for batch in epoch[start:]]
    again = next(load(seed=0).batches(0))
    assert all(torch.equal(one, other) for one, other in zip(again, epoch[0], strict=True))


def test_processes_take_equal_parts_of_every_batch(load):
    parts = [[own_numbers(batch) for batch in load(share=Share(rank, 2)).batches(0)] for rank in range(2)]
    assert parts[0][0] + parts[1][0] == list(range(16))
    assert [len(numbers) for numbers in parts[0]] == [len(numbers) for numbers in parts[1]] == [8, 8, 8, 8, 2]
    # The last batch has one row, too few for two processes.
    assert load(batch_size=17).steps_per_epoch == 5
    assert load(batch_size=17, share=Share(1, 2)).steps_per_epoch == 4


def test_empty_categories_have_a_bucket_of_their_own(load):
    model = load().make_model()
    assert model.embeddings.weight.shape == (26 * 11, 16)


def products(task, model, batch):
    """The product of the dense parameters' Hessian with a probe, by double backward and by forward over reverse."""
    dense = {name: param for name, param in model.named_parameters() if not name.startswith("embeddings")}
    generator = torch.Generator().manual_seed(0)
    probe = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in dense.items()}
    gradients = torch.autograd.grad(task.loss(model, batch), list(dense.values()), create_graph=True)
    slope = sum((g * z).sum() for g, z in zip(gradients, probe.values(), strict=True))
    backward = torch.autograd.grad(slope, list(dense.values()), allow_unused=True, materialize_grads=True)

    def loss(values):
        logits = torch.func.functional_call(model, values, batch[:2])
        return task.loss(lambda *inputs: logits, batch)

    fixed = {name: param.detach() for name, param in dense.items()}
    _, forward = torch.func.jvp(torch.func.grad(loss), (fixed,), (probe,))
    flat = torch.cat([product.flatten() for product in backward])
    return flat, torch.cat([forward[name].flatten() for name in dense])


def test_both_exact_products_agree(load):
    task = load()
    torch.manual_seed(0)
    numbers, categories, labels = next(task.batches(0))
    backward, forward = products(task, task.make_model().double(), (numbers.double(), categories, labels.double()))
    assert backward.norm() > 0
    assert (forward - backward).norm() <= 1e-8 * backward.norm()


def test_the_loss_can_be_traced_whole_and_is_the_mean_over_any_slice(load):
    task = load()
    torch.manual_seed(0)
    model, batch = task.make_model(), next(task.batches(0))
    loss = task.loss(model, batch)
    torch.testing.assert_close(torch.compile(task.loss, fullgraph=True, backend="eager")(model, batch), loss)
    halves = [task.loss(model, tuple(tensor[part] for tensor in batch)) for part in (slice(0, 8), slice(8, 16))]
    torch.testing.assert_close(sum(halves) / 2, loss)


def test_adahessian_trains_the_layers_and_adagrad_the_embeddings(load):
    task = load()
    torch.manual_seed(0)
    model = task.make_model()
    groups = adahessian.param_groups(model, sparse_lr=0.05)
    optimizer = adahessian.AdaHessian(groups, lr=0.02, betas=(0.9, 0.98), hessian_power=0.5)
    curvature = adahessian.Curvature(model, task.loss, optimizer)
    table = model.embeddings.weight.detach().clone()
    losses = []
    for epoch in range(8):
        for batch in task.batches(epoch):
            curvature.measure(batch)
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == 1:
                moved = (model.embeddings.weight != table).any(1).nonzero().squeeze(1)
                assert set(moved.tolist()) <= set((batch[1] + model.first_rows).flatten().tolist())
                assert len(moved) > 0
    measured = [param for param in model.parameters() if optimizer.state[param].get("measurements") is not None]
    assert len(measured) == len(list(model.parameters())) - 1
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_the_last_day_is_what_is_scored(load, monkeypatch):
    task = load()
    torch.manual_seed(0)
    model = task.make_model().eval()
    with torch.no_grad():
        scores = task.evaluate(model)
        numbers, categories, labels = task._log.examples(69, 80, 10)
        logits = model(numbers, categories)
        monkeypatch.setattr("adahessian.lab.tasks.recommendation._ROWS_AT_ONCE", 4)
        assert task.evaluate(model) == pytest.approx(scores)
    assert scores["test_accuracy"] == pytest.approx(100 * ((logits > 0) == labels).double().mean().item())
    assert scores["test_auc"] == pytest.approx(roc_auc_score(labels, logits))
    assert scores["test_log_loss"] == pytest.approx(binary_cross_entropy_with_logits(logits, labels).item(), rel=1e-5)
    assert {EXPERIMENT.metric.name, EXPERIMENT.curve.name} <= set(scores)


def test_a_day_without_clicks_has_no_area():
    scores = click_scores(torch.tensor([-1.0, 2.0]), torch.zeros(2))
    assert math.isnan(scores["auc"])
    assert scores["accuracy"] == 50


def test_the_settings_are_the_papers():
    settings = EXPERIMENT.defaults["adahessian"]
    assert (settings.lr, settings.betas, settings.hessian_power, settings.block_size) == (0.043, (0.9, 0.98), 0.5, 1)
    assert (settings.batch_size, settings.epochs, settings.embedding_lr) == (128, 1, 0.01)
    assert EXPERIMENT.defaults["adagrad"].lr == 0.01
