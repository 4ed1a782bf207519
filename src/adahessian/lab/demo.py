"""``adahessian demo``: real digits, and figures 1 and 3 of the paper, in about a minute."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from adahessian.lab import landscapes
from adahessian.lab.contenders import CONTENDERS
from adahessian.lab.digits import BATCH_SIZE, EPOCHS, Epoch, train, training_and_test_examples
from adahessian.lab.landscapes import WAVY_BETA1S, WAVY_LRS, WAVY_STARTS, WAVY_STEPS
from adahessian.lab.plots import plot_digits, plot_quadratic, plot_wavy
from adahessian.lab.progress import RunsProgress
from adahessian.lab.provenance import provenance
from adahessian.lab.summary import digits_table, quadratic_table, summarize_digits, wavy_table
from adahessian.lab.threads import one_thread

_FILES = (DIGITS_PLOT, FIGURE1_PLOT, FIGURE3_PLOT, RESULTS) = (
    "digits.png",
    "figure1.png",
    "figure3.png",
    "results.json",
)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Handwritten digits with AdaHessian beside SGD, Adam and AdamW, and figures 1 and 3 of the paper."""

    seeds: int = 5
    """Runs of each optimizer on the digits, with the seeds 0, 1, 2 and so on."""

    epochs: int = EPOCHS
    """Length of each run. The learning rates were searched for the default."""

    walk_steps: int = WAVY_STEPS
    """Steps of each walk in figure 3."""

    output: Path = Path("demo")
    """Folder for the plots and results.json."""

    def run(self) -> None:
        """Run everything, print tables, write plots and ``results.json``."""
        for name in ("seeds", "epochs", "walk_steps"):
            if getattr(self, name) < 1:
                raise SystemExit(f"adahessian demo: --{name.replace('_', '-')} must be 1 or more")
        started = time.perf_counter()
        console = Console()
        self.output.mkdir(parents=True, exist_ok=True)
        with one_thread():
            results: dict[str, Any] = {
                "provenance": provenance(seed=list(range(self.seeds))),
                "settings": {**asdict(self), "output": str(self.output)},
                "digits": self._learn_digits(console),
                "figure1": self._walk_quadratic(console),
                "figure3": self._walk_wavy(console),
            }
        results["seconds"] = time.perf_counter() - started
        self._file(RESULTS).write_text(json.dumps(results, indent=2) + "\n")
        console.rule(f"done in {results['seconds']:.0f} s", align="left")
        for name in _FILES:
            console.print(f"  {self._file(name)}", highlight=False, soft_wrap=True)

    def _learn_digits(self, console: Console) -> dict[str, Any]:
        training, test = training_and_test_examples()
        searched = len(CONTENDERS[0].searched_lrs)
        console.rule("handwritten digits", align="left")
        console.print(
            f"{len(training)} real digits to train on, {len(test)} to test on, a small convolutional network, "
            f"{self.epochs} epochs in batches of {BATCH_SIZE}. Each optimizer's learning rate was searched over "
            f"{searched} values in runs of {EPOCHS} epochs, by cross-validation within the training digits; it falls "
            "to 0 along half a cosine. Weight decay is the paper's. For one seed all begin with the same weights and "
            "see the same batches. AdaHessian measures its curvature at every step on the whole batch, as in the "
            "paper; economical means on a quarter of the batch and, after the first epoch, at every 10th step only, "
            "with a steady start.\n",
            highlight=False,
        )
        runs: dict[str, list[list[Epoch]]] = {contender.name: [] for contender in CONTENDERS}
        with RunsProgress(console, list(runs), seeds=self.seeds, epochs=self.epochs) as progress:
            # Seeds in the outer loop: what else the machine does then slows all contenders alike.
            for seed in range(self.seeds):
                for contender in CONTENDERS:
                    epochs = []
                    for epoch in train(contender, seed=seed, training=training, held_out=test, epochs=self.epochs):
                        epochs.append(epoch)
                        progress.after_epoch(contender.name, run=seed + 1, number=len(epochs), epoch=epoch)
                    runs[contender.name].append(epochs)
        rows = summarize_digits(CONTENDERS, runs)
        console.print()
        console.print(digits_table(rows))
        console.print(
            "Means over the seeds ± standard deviation: differences of that size decide nothing. On a problem this "
            "small every optimizer arrives, and what the table shows is that AdaHessian works as the others do, and "
            "what it costs. The ratio of times is rough: the network is tiny, and other programs may have run "
            "meanwhile.\n",
            highlight=False,
        )
        plot_digits(runs, self._file(DIGITS_PLOT))
        return {
            "table": [asdict(row) for row in rows],
            "searched_lrs": {contender.name: contender.searched_lrs for contender in CONTENDERS},
            "epochs": {name: [[asdict(epoch) for epoch in epochs] for epochs in seeds] for name, seeds in runs.items()},
        }

    def _walk_quadratic(self, console: Console) -> dict[str, Any]:
        console.rule("figure 1 of the paper", align="left")
        paths = landscapes.solve_quadratic()
        console.print(quadratic_table(paths))
        console.print(
            "AdaHessian divides by the curvature, 20 along x and 2 along y, so one step solves it (lr 1, eps 0). "
            "Gradient descent has the learning rate that is best for it, 1/11. With the usual beta1 = 0.9 "
            "AdaHessian's first step is the same, but then the first gradient goes on pushing.\n",
            highlight=False,
        )
        plot_quadratic(paths, self._file(FIGURE1_PLOT))
        return {name: path.tolist() for name, path in paths.items()}

    def _walk_wavy(self, console: Console) -> dict[str, Any]:
        console.rule("figure 3 of the paper", align="left")
        bar = Progress(
            TextColumn("walking on x² + 0.1 x sin(20πx)"),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        with bar:
            task = bar.add_task("", total=len(WAVY_BETA1S) * self.walk_steps)
            walks = {
                beta1: landscapes.compare_hessian_momentum(
                    beta1, steps=self.walk_steps, on_step=lambda: bar.advance(task)
                )
                for beta1 in WAVY_BETA1S
            }
        for beta1, of_beta1 in walks.items():
            console.print(wavy_table(beta1, of_beta1))
        console.print(
            f"f(x) = x² + 0.1 x sin(20πx), {len(WAVY_STARTS)} starts between 0 and 1 (f is even), {self.walk_steps} "
            "steps. The paper shows one walk, 7 steps with Hessian momentum and no convergence without. It gives "
            "neither the start nor the learning rate nor beta1, and all decide the outcome: so here are many. Where "
            "the learning rate is small, a start mostly stays in its own valley, with or without. The walks are "
            "chaotic: another version of torch may move a few starts.",
            highlight=False,
        )
        for beta1, of_beta1 in walks.items():
            best_with = max(of_beta1[landscapes.WITH_HESSIAN_MOMENTUM].shares())
            best_without = max(of_beta1[landscapes.WITHOUT_HESSIAN_MOMENTUM].shares())
            console.print(
                f"Each at the best learning rate of this grid, beta1 = {beta1:g}: {best_with:.0%} of the starts arrive "
                f"with Hessian momentum, {best_without:.0%} without.",
                highlight=False,
            )
        console.print()
        plot_wavy(walks, self._file(FIGURE3_PLOT))
        return {
            "starts": WAVY_STARTS.tolist(),
            "lrs": WAVY_LRS,
            "walks": [
                {
                    "beta1": beta1,
                    "beta2": beta2,
                    "shares": walk.shares(),
                    "median_arrival_steps": walk.median_arrival_steps(),
                    "final_positions": walk.positions[:, -1].tolist(),
                }
                for beta1, of_beta1 in walks.items()
                for beta2, walk in of_beta1.items()
            ],
        }

    def _file(self, name: str) -> Path:
        return self.output / name
