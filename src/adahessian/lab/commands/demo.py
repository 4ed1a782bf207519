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
from adahessian.lab.configs.checks import at_least
from adahessian.lab.configs.optimizers import OPTIMIZERS
from adahessian.lab.paper_figures import momentum, quadratic
from adahessian.lab.paper_figures.style import BLUE, GRAY, ORANGE, STYLE, VERMILION, save
from adahessian.lab.results.run_file import RunFiles, RunResult
from adahessian.lab.tasks.science import PINNTask
from adahessian.lab.tasks.task import Env
from adahessian.lab.training.checkpoint import load_checkpoint

PROG = "adahessian demo"
DIGITS, PINN = "digits", "pinn-poisson-1d"
# Optimizers and their colors. L-BFGS is what people use for the equation, and SGD for images.
_DIGITS = {"adahessian-kron": BLUE, "adahessian": "#56B4E9", "adamw": ORANGE, "sgd": VERMILION}
_PINN = {"adahessian-kron": BLUE, "adamw": ORANGE, "lbfgs": VERMILION}


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train on real digits and solve a differential equation with several optimizers, in about a minute."""

    seeds: int = 3
    """Runs per optimizer, with the seeds 1, 2, 3 and so on."""

    epochs: int = 10
    """Epochs of digits. The learning rates were searched for the default."""

    steps: int = 1000
    """Steps for the differential equation."""

    output: Path = Path("demo")
    """Folder for plots and runs."""


def main(argv: Sequence[str]) -> None:
    """Train, print a table per task, and write four figures."""
    demo = tyro.cli(Demo, args=list(argv), prog=PROG)
    at_least(1, seeds=demo.seeds, epochs=demo.epochs, steps=demo.steps)
    started, console = time.perf_counter(), Console(highlight=False, soft_wrap=True)
    seeds = ["--seeds", *map(str, range(1, demo.seeds + 1))]
    console.print(
        f"Digits: 1,297 real images to train on, a small convolutional network, {demo.epochs} epochs. The learning "
        "rates of SGD, AdamW and AdaHessian were searched. AdaHessianKron takes AdamW's."
    )
    digits = {name: _train(demo, DIGITS, name, "--epochs", str(demo.epochs), *seeds) for name in _DIGITS}
    _print_table(console, digits, "test_accuracy", "test accuracy, %", ".1f")
    console.print(
        "\nPoisson's equation in one dimension: a physics-informed network in float64, on all points at every step."
    )
    pinn = {name: _train(demo, PINN, name, "--steps", str(demo.steps)) for name in _PINN}
    _print_table(console, pinn, "relative_error", "relative error", ".1e")
    figures = {
        "digits.png": _draw_digits(digits),
        "pinn.png": _draw_pinn(pinn, demo.output),
        "figure1.png": quadratic.draw(),
        "figure3.png": momentum.draw(),
    }
    console.print("")
    for name, figure in figures.items():
        save(figure, demo.output / name)
        console.print(f"  {demo.output / name}")
    console.print(f"Done in {time.perf_counter() - started:.0f} s.")


def _train(demo: Demo, task: str, optimizer: str, *options: str) -> list[RunResult]:
    arguments = [task, optimizer, *options, "--device", "cpu", "--output", str(demo.output / "runs"), "--overwrite"]
    runs, session = parse_runs(arguments, PROG)
    return [execute(run, session, console=Console(quiet=True)) for run in runs]


def _print_table(
    console: Console, results: dict[str, list[RunResult]], metric: str, title: str, number_format: str
) -> None:
    table = Table("optimizer", "learning rate", title, "training loss", "seconds")
    for name, runs in results.items():
        values = [run.final.get(metric, np.nan) for run in runs]
        spread = f" ± {np.std(values, ddof=1):{number_format}}" if len(values) > 1 else ""
        loss, seconds = (np.mean([run.curve[column][-1] for run in runs]) for column in ("train_loss", "seconds"))
        lr = f"{runs[0].config['optimizer']['lr']:g}"
        mean = f"{np.mean(values):{number_format}}"
        table.add_row(OPTIMIZERS[name].title, lr, mean + spread, f"{loss:.2g}", f"{seconds:.1f}")
    console.print(table)


def _draw_digits(results: dict[str, list[RunResult]]) -> Figure:
    """Draw training loss and test accuracy by epoch: the mean of the seeds, and their range."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, column, title in zip(
            panels, ("train_loss", "test_accuracy"), ("Training loss", "Test accuracy, %"), strict=True
        ):
            for name, runs in results.items():
                values = np.array([run.curve[column] for run in runs])
                epochs = np.arange(1, values.shape[1] + 1)
                axes.plot(epochs, values.mean(0), color=_DIGITS[name], label=OPTIMIZERS[name].title)
                axes.fill_between(epochs, values.min(0), values.max(0), color=_DIGITS[name], alpha=0.15, linewidth=0)
            axes.set(title=title, xlabel="epoch")
        panels[0].set_yscale("log")
        panels[1].set_ylim(bottom=80)
        panels[1].legend(loc="lower right")
    return figure


def _draw_pinn(results: dict[str, list[RunResult]], output: Path) -> Figure:
    """Draw the error of the final networks, and the relative error by step."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4), layout="constrained")
        solution, error = figure.subplots(1, 2)
        for name, (run,) in results.items():
            x, exact, found = _solve(run, output)
            if name == next(iter(results)):
                solution.plot(x, exact, color=GRAY, linewidth=4, alpha=0.5, label="exact")
            title = OPTIMIZERS[name].title
            solution.plot(x, found, color=_PINN[name], linewidth=1.2, label=title)
            error.plot(run.curve["step"], run.curve["relative_error"], color=_PINN[name], label=title)
        solution.set(title="Solution after training", xlabel="x", ylabel="u(x)")
        error.set(title="Relative error", xlabel="step", yscale="log")
        solution.legend(loc="upper left")
        error.legend()
    return figure


def _solve(run: RunResult, output: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points, the exact solution, and that of the final network."""
    runs, _ = parse_runs([PINN, run.optimizer], PROG)
    task = PINNTask(runs[0].config.task, Env(data_dir=Path(), device=torch.device("cpu"), seed=run.seed))
    model = task.build_model()
    files = RunFiles(output=output / "runs", task=run.task, label=run.label, seed=run.seed)
    model.load_state_dict(load_checkpoint(files.weights))
    points = torch.linspace(-1, 1, 401, dtype=torch.float64)[:, None]
    with torch.no_grad():
        found = model(points)[0]
    return points[:, 0].numpy(), task.exact(points)[0].numpy(), found.numpy()
