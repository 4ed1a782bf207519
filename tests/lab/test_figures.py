import copy
import math

import pandas as pd
import pytest
import torch
from made_up_runs import make_run, rows_of
from torch import nn
from torch.func import functional_call

from adahessian import AdaHessian
from adahessian.lab.commands import figure
from adahessian.lab.commands.train import execute, parse_runs
from adahessian.lab.configs.run import Metric
from adahessian.lab.errors import CheckpointError, ConfigError, LabError, RunFileError
from adahessian.lab.paper_figures import surface, walks
from adahessian.lab.paper_figures.walks import LRS, STARTS, WITH, WITHOUT
from adahessian.lab.results import plots

ACCURACY = Metric(name="test_accuracy", title="test accuracy, %")

# Figure 1 -------------------------------------------------------------------------------------------------------------


def test_one_step_solves_the_quadratic():
    paths = walks.solve_quadratic()
    distances = {name: path.norm(dim=1) for name, path in paths.items()}
    assert distances[walks.ADAHESSIAN][1:].max() < 1e-6
    assert distances[walks.WITH_MOMENTUM][1] < 1e-6
    distance = distances[walks.GRADIENT_DESCENT]
    # The condition number is 10: no constant learning rate shrinks both coordinates by more than 9/11 per step.
    torch.testing.assert_close(distance[1:] / distance[:-1], torch.full_like(distance[1:], 9 / 11))


# Figure 3 -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def walked():
    return walks.compare_momentum(0.9, steps=300)


def test_hessian_momentum_helps_at_large_learning_rates(walked):
    counts, counts_without = (walks.arrived(walked[beta2]).sum(1) for beta2 in (WITH, WITHOUT))
    assert (counts > counts_without)[torch.tensor(LRS) >= 3].all()


def test_points_do_not_feel_each_other(walked):
    path = walks.walk(walks.wavy, [{"params": STARTS[40:41], "lr": LRS[2]}], AdaHessian, steps=20)[0, :, 0]
    torch.testing.assert_close(path, walked[WITH][2, :21, 40])


def test_passing_through_the_lowest_valley_is_not_arriving():
    x = torch.linspace(0, 0.1, 100_001, dtype=torch.float64)
    lowest = x[walks.wavy(x).argmin()]
    assert walks.wavy(lowest).item() == pytest.approx(walks.LOWEST, rel=1e-6)
    positions = torch.full((1, 301, 4), 0.5, dtype=torch.float64)
    positions[0, 7:, 0] = lowest
    positions[0, 7:, 1] = -lowest
    positions[0, 7:200, 2] = lowest
    assert walks.arrived(positions).tolist() == [[True, True, False, False]]


# Figure 2 -------------------------------------------------------------------------------------------------------------

INPUTS, TARGETS = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def loss_of(model):
    # Outputs that count alike would share their eigenvalues.
    return ((model(INPUTS) - TARGETS[:, :2]).square() * torch.tensor([1.0, 3.0])).mean()


def test_eigenpairs_are_those_of_the_exact_hessian(tiny):
    weight = tiny[0].weight

    def loss(value):
        return loss_of(lambda inputs: functional_call(tiny, {"0.weight": value.view_as(weight)}, (inputs,)))

    values, vectors = torch.linalg.eigh(torch.func.hessian(loss)(weight.detach().flatten()))
    order = values.abs().argsort(descending=True)
    found, found_vectors = surface.leading_eigenpairs(loss_of(tiny), weight)
    for value, vector, index in zip(found, found_vectors, order[:2].tolist(), strict=True):
        assert value == pytest.approx(values[index].item(), rel=1e-4)
        assert abs((vector.flatten() @ vectors[:, index]).item()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("diagonal", [(3.0, -2.9, 1.0, 0.5), (2.9, -3.0, 1.0, 0.5)])
def test_the_eigenvalue_of_largest_magnitude_comes_first(diagonal):
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    loss = (weight.square() * torch.tensor(diagonal)).sum() / 2
    values, _ = surface.leading_eigenpairs(loss, weight)
    assert values.tolist() == pytest.approx(sorted(diagonal[:2], key=abs)[::-1], rel=1e-5)


def test_surface_is_the_loss_around_the_weights(tiny):
    tiny.append(nn.Linear(2, 2, bias=False).double())
    tiny[3].weight.requires_grad_(False).copy_(torch.eye(2))
    before = copy.deepcopy(tiny.state_dict())
    found = surface.measure_surface(tiny, lambda: loss_of(tiny))
    losses = found.losses
    assert found.weight == "2.weight"
    assert losses.shape == (21, 21)
    assert losses[10, 10] == pytest.approx(loss_of(tiny).item(), rel=1e-6)
    torch.testing.assert_close(dict(tiny.state_dict()), before)
    # The loss is quadratic in the last layer: second differences along either axis are the eigenvalues.
    step = found.offsets[1] - found.offsets[0]
    assert found.offsets[20] == pytest.approx(math.sqrt(2 / found.eigenvalues[0]))
    along = (losses[2:, 10] - 2 * losses[1:-1, 10] + losses[:-2, 10]) / step**2
    across = (losses[10, 2:] - 2 * losses[10, 1:-1] + losses[10, :-2]) / step**2
    assert along.tolist() == pytest.approx([found.eigenvalues[0]] * 19, rel=2e-2)
    assert across.tolist() == pytest.approx([found.eigenvalues[1]] * 19, rel=2e-2)


def test_weights_without_curvature_are_rejected():
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(LabError, match="--weights"):
        surface.leading_eigenpairs(weight.sum(), weight)


def test_figure_2_of_a_run(tmp_path):
    arguments = ["digits", "sgd", "--steps", "3", "--device", "cpu", "--output", str(tmp_path)]
    (run,), session = parse_runs(arguments, "test")
    execute(run, session)
    (weights,) = tmp_path.rglob("weights.pt")
    output = tmp_path / "figure.svg"
    arguments = ["2", "--output", str(output), "--weights", str(weights)]
    figure.main(arguments)
    assert "<svg" in output.read_text()
    weights.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"weights\.pt"):
        figure.main(arguments)
    with pytest.raises(RunFileError, match="absent"):
        figure.main([*arguments[:-1], str(tmp_path / "absent" / "weights.pt")])
    with pytest.raises(ConfigError, match="--weights"):
        figure.main(arguments[:-2])


# Figures of runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path):
    """Runs of three optimizers at three lengths and three learning rates, one of which diverges."""
    runs = []
    for optimizer, value in (("sgd", 90.0), ("adamw", 91.0), ("adahessian-kron", 92.0)):
        runs += [make_run(optimizer, seed, value + seed / 10) for seed in (1, 2)]
        runs += [make_run(optimizer, 1, value - 100 / epochs, epochs=epochs) for epochs in (20, 40)]
        runs += [make_run(optimizer, 1, value - lr, lr=lr) for lr in (1.5, 3.0)]
        runs += [make_run(optimizer, 1, math.nan, lr=9.0)]
    return rows_of(tmp_path / "runs", *runs)


def test_race_draws_means_of_complete_runs(many):
    axes = plots.race(many, ACCURACY).axes[0]
    drawn = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in axes.containers}
    assert list(drawn) == ["SGD", "AdamW", "AdaHessianKron"]
    # 196 steps per epoch of 4 ms each.
    expected = [(epochs * 0.784, value) for epochs, value in ((20, 86.0), (40, 88.5), (160, 91.15))]
    assert [tuple(point) for point in drawn["AdamW"]] == [pytest.approx(point) for point in expected]
    assert "seconds" in axes.get_xlabel()


def test_diverged_learning_rates_are_at_the_edge(many):
    axes = plots.lr_sensitivity(many, ACCURACY).axes[0]
    (line,) = (line for line in axes.get_lines() if line.get_label() == "AdamW")
    assert line.get_xdata().tolist() == [0.01, 1.5, 3.0, 9.0]
    assert line.get_ydata()[-1] == axes.get_ylim()[0]
    assert line.get_ydata()[0] == pytest.approx(91.15)


def test_cost_is_relative_to_the_baseline(tmp_path):
    runs = rows_of(tmp_path, make_run("adamw", step_ms=4.0), make_run("muon", step_ms=5.0), make_run(exclusive=False))
    axes = plots.cost_against_quality(runs, ACCURACY).axes[0]
    drawn = {bars.get_label(): bars.lines[0].get_xdata()[0] for bars in axes.containers}
    assert drawn == {"AdamW": 1.0, "Muon": 1.25}


def test_every_seed_is_a_dot(many):
    own = many[many.label == "sgd"]
    axes = plots.every_seed(own, ACCURACY).axes[0]
    dots, mean = axes.get_lines()
    assert sorted(dots.get_xdata()) == [90.1, 90.2]
    assert mean.get_xdata()[0] == pytest.approx(90.15)


def test_curves_show_the_range_of_the_seeds():
    rows = pd.DataFrame({"label": "sgd", "optimizer": "sgd", "step": [1, 2, 1, 2], "train_loss": [4.0, 1.0, 2.0, 0.5]})
    axes = plots.curves(rows, Metric(name="train_loss", title="training loss", higher_is_better=False)).axes[0]
    assert axes.get_lines()[0].get_ydata().tolist() == [3.0, 0.75]
    (band,) = axes.collections
    assert sorted({*band.get_paths()[0].vertices[:, 1]}) == [0.5, 1.0, 2.0, 4.0]
    assert axes.get_yscale() == "log"


@pytest.mark.parametrize("name", ["race", "lr", "cost", "seeds"])
def test_figures_are_written(name, many, tmp_path):
    output = tmp_path / f"{name}.png"
    figure.main([name, "--paths", str(tmp_path / "runs"), "--output", str(output)])
    assert output.read_bytes().startswith(b"\x89PNG")


def test_figures_that_cannot_be_drawn(many, tmp_path):
    rows_of(tmp_path / "runs", make_run(task="digits"))
    paths = ["--paths", str(tmp_path / "runs")]
    with pytest.raises(ConfigError, match="--task"):
        figure.main(["race", *paths])
    with pytest.raises(ConfigError, match="lr"):
        figure.main(["lr", *paths, "--task", "digits"])
    with pytest.raises(ConfigError, match="--output"):
        figure.main(["race", *paths, "--task", "digits", "--output", "race.gif"])
