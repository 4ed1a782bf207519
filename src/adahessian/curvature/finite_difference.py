"""Hessian-vector products by differences of gradients, for smooth networks only.

    H z = (g(theta + h z) - g(theta - h z)) / (2 h) + O(h^2) + O(eps / h)

Two ordinary gradients; nothing is differentiated twice. Where a gradient jumps, as at the kink of a ReLU, the
difference is not the curvature: what crosses a kink adds its jump divided by h, and the error grows as h shrinks, like
h^(-1/2): on a ReLU network with batch norm it is larger than the product at any usable step. With GELU in place of ReLU
it falls with h, until rounding takes over. So a graph with a kink is refused.

A second derivative that jumps does no harm: the difference is its mean over the step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from adahessian.curvature.errors import CurvatureError
from adahessian.curvature.graph import nodes
from adahessian.curvature.hutchinson import accumulation_dtype, as_reals

# Operations whose first derivative jumps, by the names of their nodes.
_KINKED = re.compile(
    r"""
      (Leaky)?Relu | PreluKernel | RreluWithNoise(Functional)? | Threshold
    | Hard(tanh|swish|sigmoid|shrink) | Softshrink
    | (Adaptive|Fractional|Mkldnn)?MaxPool\dD(WithIndices)?
    | (Cudnn)?GridSampler(\dD(CpuFallback)?)?
    | Abs | Angle | Sign | Sgn | Copysign | Clamp(Min|Max)? | Renorm
    | Ceil | Floor | Frac | Round | Trunc | Fmod | Remainder | FakeQuantize\w+ | FusedMovingAvgObsFqHelper
    | Max(imum)? | Min(imum)? | Fmax | Fmin | Amax | Amin | Aminmax | Cummax | Cummin
    | Median | Nanmedian | Mode | Kthvalue | Sort | Topk
    | Multi(label)?MarginLoss
    """,
    re.VERBOSE,
)


def _takes_extremes(node: Any) -> bool:
    return node._saved_reduce in ("amax", "amin", "max", "min")


def _measures_by_magnitudes(node: Any) -> bool:
    order = getattr(node, "_saved_ord", None) or getattr(node, "_saved_p", None) or 2
    return not 1 < order < math.inf


# Operations that have a kink with some of their arguments.
_KINKED_IF: dict[str, Callable[[Any], bool]] = {
    "Elu": lambda node: node._saved_alpha * node._saved_input_scale != 1,  # the slope on the left; on the right it is 1
    "Div": lambda node: getattr(node, "_saved_rounding_mode", None) is not None,
    "EmbeddingBag": lambda node: node._saved_mode == 2,  # max
    "CudnnRnn": lambda node: node._saved_mode == 0,  # ReLU
    "MiopenRnn": lambda node: node._saved_mode == 0,
    **dict.fromkeys(("ScatterReduce", "IndexReduce", "SegmentReduce"), _takes_extremes),
    **dict.fromkeys(("Norm", "LinalgVectorNorm", "Dist", "Cdist", "Pdist"), _measures_by_magnitudes),
}


def finite_difference_product(
    gradient: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
    parameters: Sequence[Tensor],
    vector: Sequence[Tensor],
    step: float,
) -> list[Tensor | None]:
    """``H z`` by a central difference; None for a parameter that has no gradient.

    The step is relative: h is ``step`` times the scale of the parameters, the median over all matrices and kernels of
    their root mean square. Neither large embeddings, nor norms that are 1, nor biases that are 0 decide about it.

    Args:
        gradient: From values of the parameters to the gradients of the loss there: both times of the same function,
            with the same batch, the same dropout mask and the same buffers.
        parameters: The parameters, which stay as they are.
        vector: z, in the shapes of the parameters.
        step: What :func:`relative_step` says, unless you know better.
    """
    h = step * _scale(parameters)
    ahead, behind = (
        gradient([torch.add(param.detach(), z, alpha=shift) for param, z in zip(parameters, vector, strict=True)])
        for shift in (h, -h)
    )
    return [None if a is None or b is None else (a - b) / (2 * h) for a, b in zip(ahead, behind, strict=True)]


def relative_step(loss: Tensor) -> float:
    """Half the cube root of the coarsest precision that a loss is computed in.

    The cube root balances the two errors, h^2 and eps / h. It is 2.5e-3 in float32, 3e-6 in float64 and 0.1 in bfloat16
    or under its autocast.

    Args:
        loss: A loss with its graph.
    """
    dtypes = {output.dtype for node in nodes([loss]) for output in node._input_metadata}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return float(0.5 * eps ** (1 / 3))


def check_smooth(loss: Tensor) -> None:
    """Refuse a loss whose gradient jumps somewhere, by the graph of what was run.

    Comparisons leave no node: a kink that is made of ``torch.where`` or of a mask is not seen.

    Args:
        loss: A loss with its graph.

    Raises:
        CurvatureError: If an operation has a kink or cannot be looked into; it is named, with the remedy.
    """
    problems = sorted({problem for node in nodes([loss]) if (problem := _problem(node)) is not None})
    if problems:
        raise CurvatureError(
            f"no curvature by finite differences: {', '.join(problems)}. Gradients that jump have differences that are "
            'not the curvature. Remedy: take product="double_backward" or "auto", or smooth operations (GELU, SiLU, '
            "tanh or softplus; average pooling)."
        )


def _problem(node: Node) -> str | None:
    function = getattr(node, "_forward_cls", None)
    if function is not None or "CppNode" in node.name():
        return f"{getattr(function, '__qualname__', node.name())} is a function of its own, which may have a kink"
    named = re.match(r"(?:Foreach)?(\w+?)Backward", node.name())
    operation = named.group(1) if named else ""
    if _KINKED.fullmatch(operation) or (operation in _KINKED_IF and _KINKED_IF[operation](node)):
        return f"{operation} has a kink"
    return None


def _scale(parameters: Sequence[Tensor]) -> float:
    """The median root mean square of matrices and kernels, or of all parameters where there are none."""
    weights = [param for param in parameters if param.dim() > 1] or parameters
    sizes = torch.stack([_root_mean_square(weight).to(weights[0].device) for weight in weights])
    sizes = sizes[sizes > 0]
    return float(sizes.median()) if len(sizes) else 1.0


def _root_mean_square(weight: Tensor) -> Tensor:
    reals = as_reals(weight.detach())
    norm: Tensor = torch.linalg.vector_norm(reals, dtype=accumulation_dtype(reals.dtype))
    return norm / math.sqrt(reals.numel())
