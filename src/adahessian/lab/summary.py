"""From runs to numbers, and from numbers to tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev

from rich.table import Table
from torch import Tensor

from adahessian.lab import landscapes
from adahessian.lab.contenders import Contender
from adahessian.lab.digits import Epoch
from adahessian.lab.landscapes import WAVY_LRS, WavyWalks


@dataclass(frozen=True, kw_only=True)
class DigitsRow:
    """What the runs of one contender came to."""

    name: str
    lr: float
    test_accuracies: list[float]
    train_losses: list[float]
    step_seconds: list[float]
    step_time_ratio: float
    """Seconds a step over those of the first contender: in each pair of runs with the same seed, then their median."""


def summarize_digits(contenders: Sequence[Contender], runs: Mapping[str, Sequence[Sequence[Epoch]]]) -> list[DigitsRow]:
    """Numbers at the end of the last epoch, whatever came before it.

    Args:
        contenders: The contenders; step times are set against the first one's.
        runs: For each contender's name the epochs of each seed.
    """
    ends = {name: [epochs[-1] for epochs in seeds] for name, seeds in runs.items()}
    step_seconds = {name: [end.train_seconds / end.steps for end in of_seeds] for name, of_seeds in ends.items()}
    base = step_seconds[contenders[0].name]
    return [
        DigitsRow(
            name=contender.name,
            lr=contender.lr,
            test_accuracies=[end.accuracy for end in ends[contender.name]],
            train_losses=[end.train_loss for end in ends[contender.name]],
            step_seconds=step_seconds[contender.name],
            step_time_ratio=median(
                own / others for own, others in zip(step_seconds[contender.name], base, strict=True)
            ),
        )
        for contender in contenders
    ]


def digits_table(rows: Sequence[DigitsRow]) -> Table:
    """The contenders side by side."""
    seeds = len(rows[0].test_accuracies)
    table = Table(title=f"Handwritten digits: {seeds} seed{'s' if seeds > 1 else ''} each", title_justify="left")
    table.add_column("optimizer")
    for heading in ("lr", "test\naccuracy %", "training\nloss", f"time a step,\n{rows[0].name} = 1"):
        table.add_column(heading, justify="right")
    for row in rows:
        spread = f" ± {100 * stdev(row.test_accuracies):.2f}" if seeds > 1 else ""
        table.add_row(
            row.name,
            f"{row.lr:g}",
            f"{100 * mean(row.test_accuracies):.2f}{spread}",
            f"{mean(row.train_losses):.4f}",
            f"{row.step_time_ratio:.1f}",
        )
    return table


def quadratic_table(paths: Mapping[str, Tensor]) -> Table:
    """Distances to the minimum along the ways of figure 1."""
    table = Table(title="Figure 1: distance to the minimum of 10x² + y²", title_justify="left")
    table.add_column("way down")
    shown_steps = (0, 1, 2, 10, landscapes.QUADRATIC_STEPS)
    for step in shown_steps:
        table.add_column(f"step {step}" if step else "start", justify="right")
    for name, path in paths.items():
        distances = path.norm(dim=1)
        table.add_row(name, *(f"{distances[step].item():.2g}" for step in shown_steps))
    return table


def wavy_table(beta1: float, walks: Mapping[float, WavyWalks]) -> Table:
    """What became of the starts of figure 3 at each learning rate, for one momentum of the gradient."""
    title = f"Figure 3, beta1 = {beta1:g}: starts that end in a lowest minimum"
    table = Table(title=title, title_justify="left")
    table.add_column("lr", justify="right")
    columns = []
    for beta2, walk in walks.items():
        momentum = "with" if beta2 else "without"
        table.add_column(f"{momentum}\nHessian momentum", justify="right")
        table.add_column("median\nsteps", justify="right")
        columns.append([f"{share:.0%}" for share in walk.shares()])
        columns.append(["" if steps is None else f"{steps:.0f}" for steps in walk.median_arrival_steps()])
    for lr, *cells in zip(WAVY_LRS, *columns, strict=True):
        table.add_row(f"{lr:g}", *cells)
    return table
