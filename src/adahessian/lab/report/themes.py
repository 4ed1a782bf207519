"""How plots look on light and on dark pages."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from adahessian.lab.plots import STYLE as HOUSE_STYLE

Theme: TypeAlias = Literal["light", "dark"]

DARK_PAPER, DARK_INK = "#15181c", "#e6e6e6"

_DARK: dict[Any, Any] = {
    "figure.facecolor": DARK_PAPER,
    "axes.facecolor": DARK_PAPER,
    "axes.edgecolor": DARK_INK,
    "axes.labelcolor": DARK_INK,
    "axes.titlecolor": DARK_INK,
    "xtick.color": DARK_INK,
    "ytick.color": DARK_INK,
    "text.color": DARK_INK,
    "grid.color": "#33383f",
}


def style(theme: Theme) -> dict[Any, Any]:
    """Settings of matplotlib: the house's, in the colours of a theme."""
    return {**HOUSE_STYLE, **(_DARK if theme == "dark" else {})}
