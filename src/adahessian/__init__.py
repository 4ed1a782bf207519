"""AdaHessian: a second-order optimizer that drops into a PyTorch training loop."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adahessian.attachment import attach
    from adahessian.base.errors import CurvatureError
    from adahessian.curvature import Curvature
    from adahessian.diagnostics import diagnose
    from adahessian.groups import param_groups
    from adahessian.kron import AdaHessianKron
    from adahessian.optimizer import AdaHessian
    from adahessian.training_step import TrainingStep

__all__ = ["AdaHessian", "AdaHessianKron", "Curvature", "CurvatureError", "TrainingStep"]
__all__ += ["attach", "diagnose", "param_groups"]
__version__ = "0.2.0"

_MODULES = {
    "AdaHessian": "optimizer",
    "AdaHessianKron": "kron",
    "Curvature": "curvature",
    "CurvatureError": "base.errors",
    "TrainingStep": "training_step",
    "attach": "attachment",
    "diagnose": "diagnostics",
    "param_groups": "groups",
}


def __getattr__(name: str) -> Any:
    # Importing the package itself must not import torch, which takes seconds.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals() | _MODULES)
