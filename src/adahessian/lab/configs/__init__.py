"""Options and the paper's settings. Imports neither torch nor a task."""

# The families register their presets in this order.
# isort: off
from adahessian.lab.configs import digits, images, translation, language, glue, recommendation, science  # noqa: F401

# isort: on
from adahessian.lab.configs.presets import PRESETS, Preset, find_preset

__all__ = ["PRESETS", "Preset", "find_preset"]
