"""`adahessian figure`: one figure of the paper, or of runs, as a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro
from matplotlib.figure import Figure
from tyro.conf import Positional

from adahessian.lab.configs.checks import Options
from adahessian.lab.errors import ConfigError
from adahessian.lab.paper_figures import surface, walks
from adahessian.lab.paper_figures.style import save
from adahessian.lab.results import frames, plots


class Drawing(Options):
    """Draw figure 1, 2 or 3 of the paper, or a figure of runs. Figures 1 and 3 are computed on the spot."""

    # Figure of the paper, or of runs: by budget, by learning rate, by cost, or every seed.
    name: Positional[Literal["1", "2", "3", "race", "lr", "cost", "seeds"]]
    paths: tuple[Path, ...] = (Path("runs"),)  # Run files or folders, for figures of runs.
    task: str | None = None  # Task, for figures of runs. None uses the only one.
    weights: Path | None = None  # weights.pt of a finished run, for figure 2.
    data_dir: Path = Path("data")  # Folder with the data, for figure 2.
    output: Path | None = None  # PNG, SVG or PDF file to write. None writes figure-NAME.png.


def main(argv: Sequence[str]) -> None:
    """Draw the figure and write it."""
    options = tyro.cli(Drawing, args=argv, prog="adahessian figure")
    path = options.output or Path(f"figure-{options.name}.png")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--output {path} has an unsupported suffix. Pass a .png, .svg or .pdf file.")
    save(_draw(options), path)
    print(f"{path} shows figure {options.name}.")


def _draw(options: Drawing) -> Figure:
    if options.name == "1":
        return walks.draw_quadratic()
    if options.name == "3":
        return walks.draw_momentum()
    if options.name == "2":
        if options.weights is None:
            raise ConfigError("--weights is missing. Figure 2 needs the weights.pt of a finished run.")
        return surface.draw(options.weights, options.data_dir)
    runs = frames.runs(options.paths)
    runs = runs[~runs.is_trial.astype(bool) & runs.task.isin([options.task] if options.task else runs.task)]
    tasks = list(dict.fromkeys(runs.task))
    if len(tasks) != 1:
        raise ConfigError(f"--task is needed to choose one task. --paths has runs of {', '.join(tasks) or 'none'}.")
    if frames.shown_in(options.name, runs).empty:
        raise ConfigError(f"--paths has no runs of {tasks[0]} for the figure {options.name}. Pass other paths.")
    return plots.draw(options.name, runs)
