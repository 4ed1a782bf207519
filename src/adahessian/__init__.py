"""AdaHessian: second-order training that drops into a PyTorch loop."""

from adahessian.captured import CapturedStep
from adahessian.curvature.errors import CurvatureError
from adahessian.curvature.gauss_newton import GaussNewton
from adahessian.curvature.measurement import Curvature
from adahessian.groups import param_groups
from adahessian.optimizer import AdaHessian

__all__ = ["AdaHessian", "CapturedStep", "Curvature", "CurvatureError", "GaussNewton", "param_groups"]
__version__ = "0.1.0"
