"""`adahessian demo`: digits and a differential equation with several optimizers, and figures 1 and 3 of the paper."""

import time
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console

from adahessian.lab.commands.report import print_tables
from adahessian.lab.commands.train import execute, parse_runs
from adahessian.lab.configs.checks import Count, Options
from adahessian.lab.paper_figures import walks
from adahessian.lab.paper_figures.style import save
from adahessian.lab.results import frames, plots
from adahessian.lab.results.run_file import RunFiles

# L-BFGS is common for the equation, and SGD for images.
_OPTIMIZERS = {
    "digits": ("adahessian-kron", "adahessian", "adamw", "sgd"),
    "pinn-poisson-1d": ("adahessian-kron", "adamw", "lbfgs"),
}
_ABOUT = """\
Digits: a small convolutional network and 1,297 real training images. The learning rates of SGD, AdamW and AdaHessian
were tuned. AdaHessianKron uses AdamW's. Poisson's equation: a physics-informed network in float64 that uses all points
at every step. No learning rate was tuned, and each step of L-BFGS evaluates the loss several times.
"""


class Demo(Options):
    """Train on real digits and solve a differential equation with several optimizers, in about a minute."""

    seeds: Count = 3  # Runs per optimizer, with seeds 1, 2, 3 and so on.
    epochs: Count = 10  # Epochs on digits. The learning rates were tuned for the default.
    steps: Count = 1000  # Steps for the differential equation.
    output: Path = Path("demo")  # Folder for figures and runs.


def main(argv: Sequence[str]) -> None:
    """Train, print a table per task, and write four figures."""
    demo = tyro.cli(Demo, args=argv, prog="adahessian demo")
    started, drawn = time.perf_counter(), {}
    print(_ABOUT, flush=True)
    lengths = {"digits": ["--epochs", demo.epochs], "pinn-poisson-1d": ["--steps", demo.steps, "--eval-every", 25]}
    common = ["--seeds", *range(1, 1 + demo.seeds), "--output", demo.output / "runs"]
    common += ["--device", "cpu", "--exclusive", "--overwrite"]
    for task, optimizers in _OPTIMIZERS.items():
        files = []
        for optimizer in optimizers:
            runs, session = parse_runs([task, optimizer, *map(str, [*lengths[task], *common])], "adahessian demo")
            for run in runs:
                execute(run, session, console=Console(quiet=True))
                files.append(RunFiles(output=session.output, task=task, label=run.label, seed=run.seed).result)
        rows = frames.runs(files)
        print_tables(rows)
        drawn[task] = plots.curves(frames.curves(rows), frames.metric_of(rows), frames.heading(task))
    drawn |= {"figure1": walks.draw_quadratic(), "figure3": walks.draw_momentum()}
    for name, figure in drawn.items():
        save(figure, demo.output / f"{name}.png")
        print(f"  {demo.output / name}.png")
    print(f"Done in {time.perf_counter() - started:.0f} s.")
