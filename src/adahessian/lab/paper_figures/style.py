"""The style of all figures."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito's colors, which people with any kind of color vision can tell apart.
BLUE, SKY, ORANGE, VERMILION, GREEN, PINK = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7"
GRAY = "#555555"

styled = matplotlib.rc_context(
    {
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#E6E6E6",
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
    }
)
"""Decorates functions that draw a figure."""


def save(figure: Figure, path: Path) -> None:
    """Write a figure, in the format of the suffix, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
