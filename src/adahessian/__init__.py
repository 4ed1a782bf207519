"""AdaHessian: second-order training that drops into a PyTorch loop."""

from adahessian.captured import CapturedStep
from adahessian.curvature.errors import CurvatureError
from adahessian.curvature.gauss_newton import GaussNewton
from adahessian.curvature.measurement import Curvature
from adahessian.diagnostics import diagnose
from adahessian.groups import param_groups
from adahessian.lr_range import LrRange, suggest_lr
from adahessian.optimizer import AdaHessian
from adahessian.sparse import DenseAndSparse

__all__ = [
    "AdaHessian",
    "CapturedStep",
    "Curvature",
    "CurvatureError",
    "DenseAndSparse",
    "GaussNewton",
    "LrRange",
    "diagnose",
    "param_groups",
    "suggest_lr",
]
__version__ = "0.1.0"
