"""`adahessian demo`: digits and a differential equation with several optimizers, and figures 1 and 3 of the paper."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from adahessian.lab.commands.train import execute, parse_runs
from adahessian.lab.configs import find_preset
from adahessian.lab.configs.checks import at_least
from adahessian.lab.configs.optimizers import OPTIMIZERS
from adahessian.lab.paper_figures import momentum, quadratic
from adahessian.lab.paper_figures.style import GRAY, STYLE, save
from adahessian.lab.results.plots import COLORS
from adahessian.lab.results.run_file import RunFiles, RunResult
from adahessian.lab.results.tables import spread
from adahessian.lab.tasks.science import PoissonTask
from adahessian.lab.tasks.task import Env
from adahessian.lab.training.checkpoint import load_checkpoint

# L-BFGS is what people use for the equation, and SGD for images.
DIGITS, _DIGITS_OPTIMIZERS = "digits", ("adahessian-kron", "adahessian", "adamw", "sgd")
PINN, _PINN_OPTIMIZERS = "pinn-poisson-1d", ("adahessian-kron", "adamw", "lbfgs")


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train on real digits and solve a differential equation with several optimizers, in about a minute."""

    seeds: int = 3  # Runs per optimizer, with the seeds 1, 2, 3 and so on.
    epochs: int = 10  # Epochs of digits. The learning rates were searched for the default.
    steps: int = 1000  # Steps for the differential equation.
    output: Path = Path("demo")  # Folder for plots and runs.


def main(argv: Sequence[str]) -> None:
    """Train, print a table per task, and write four figures."""
    demo = tyro.cli(Demo, args=argv, prog="adahessian demo")
    at_least(1, seeds=demo.seeds, epochs=demo.epochs, steps=demo.steps)
    started, console = time.perf_counter(), Console(highlight=False, soft_wrap=True)
    seeds = [str(seed + 1) for seed in range(demo.seeds)]
    console.print(
        f"Digits: 1,297 real images to train on, a small convolutional network, {demo.epochs} epochs. The learning "
        "rates of SGD, AdamW and AdaHessian were searched. AdaHessianKron takes AdamW's."
    )
    digits = _train(DIGITS, _DIGITS_OPTIMIZERS, demo.output, "--epochs", str(demo.epochs), "--seeds", *seeds)
    console.print(_table(digits))
    console.print(
        "\nPoisson's equation in one dimension: a physics-informed network in float64, on all points at every step."
    )
    pinn = _train(PINN, _PINN_OPTIMIZERS, demo.output, "--steps", str(demo.steps))
    console.print(_table(pinn))
    with matplotlib.rc_context(STYLE):
        drawn = {"digits": _draw_digits(digits), "pinn": _draw_pinn(pinn, demo.output)}
    console.print("")
    for name, figure in {**drawn, "figure1": quadratic.draw(), "figure3": momentum.draw()}.items():
        save(figure, demo.output / f"{name}.png")
        console.print(f"  {demo.output / name}.png")
    console.print(f"Done in {time.perf_counter() - started:.0f} s.")


def _train(task: str, optimizers: Sequence[str], output: Path, *options: str) -> dict[str, list[RunResult]]:
    results = {}
    for name in optimizers:
        arguments = [task, name, *options, "--device", "cpu", "--output", str(output / "runs"), "--overwrite"]
        runs, session = parse_runs(arguments, "adahessian demo")
        results[name] = [execute(run, session, console=Console(quiet=True)) for run in runs]
    return results


def _table(results: dict[str, list[RunResult]]) -> Table:
    first = next(iter(results.values()))[0]
    metric = find_preset(first.task).config(first.optimizer).task.metric
    table = Table("optimizer", "learning rate", metric.title, "training loss", "seconds")
    for name, runs in results.items():
        values = [run.final.get(metric.name, np.nan) for run in runs]
        std = float(np.std(values, ddof=1)) if len(values) > 1 else np.nan
        loss, seconds = (np.mean([run.curve[column][-1] for run in runs]) for column in ("train_loss", "seconds"))
        lr, value = f"{runs[0].config['optimizer']['lr']:g}", spread(float(np.mean(values)), std, metric.digits)
        table.add_row(OPTIMIZERS[name].title, lr, value, f"{loss:.2g}", f"{seconds:.1f}")
    return table


def _draw_digits(results: dict[str, list[RunResult]]) -> Figure:
    """Draw training loss and test accuracy by epoch: the mean of the seeds, and their range."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for axes, column, title in ((loss, "train_loss", "Training loss"), (accuracy, "test_accuracy", "Test accuracy, %")):
        for name, runs in results.items():
            values = np.array([run.curve[column] for run in runs])
            epochs, color = np.arange(1, values.shape[1] + 1), COLORS[name]
            axes.plot(epochs, values.mean(0), color=color, label=OPTIMIZERS[name].title)
            axes.fill_between(epochs, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel="epoch")
    loss.set_yscale("log")
    accuracy.set_ylim(bottom=80)
    accuracy.legend(loc="lower right")
    return figure


def _draw_pinn(results: dict[str, list[RunResult]], output: Path) -> Figure:
    """Draw the exact solution and those of the final networks, and the relative error by step."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    solution, error = figure.subplots(1, 2)
    points = torch.linspace(-1, 1, 401, dtype=torch.float64)[:, None]
    for name, (run,) in results.items():
        env = Env(data_dir=Path(), device=torch.device("cpu"), seed=run.seed)
        task = PoissonTask(find_preset(PINN).config(name).task, env)
        if not solution.lines:
            solution.plot(points, task.exact(points)[0], color=GRAY, linewidth=4, alpha=0.5, label="exact")
        model, look = task.build_model(), {"color": COLORS[name], "label": OPTIMIZERS[name].title}
        files = RunFiles(output=output / "runs", task=PINN, label=run.label, seed=run.seed)
        model.load_state_dict(load_checkpoint(files.weights))
        solution.plot(points, model(points)[0].detach(), linewidth=1.2, **look)
        error.plot(run.curve["step"], run.curve["relative_error"], **look)
    solution.set(title="Solution after training", xlabel="x", ylabel="u(x)")
    error.set(title="Relative error", xlabel="step", yscale="log")
    solution.legend(loc="upper left")
    error.legend()
    return figure
