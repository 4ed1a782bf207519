"""What the tests of functions whose second derivative is written out have in common."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn

from adahessian import AdaHessian
from adahessian.curvature import written_out
from adahessian.curvature.ways import Found, Problem, double_backward
from adahessian.curvature.written_out import Pass

# Which of three inputs need a gradient, and along which of these gradients to differentiate once more.
NEEDED_AND_ALONG = [
    (needed, along)
    for needed in product([True, False], repeat=3)
    for count in (1, 2)
    for along in combinations(range(sum(needed)), count)
]


class AtGradient(Pass):
    """A pass that asks for no gradient but its own: of whatever is called in it that is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.is_at_gradient = True

    def remember(self, ctx: Any) -> None:
        super().remember(ctx)
        ctx.is_within_gradient = False


def watched_applications(monkeypatch: Any, function: Any) -> list[Any]:
    """What an autograd function, by its module's ``applied``, has been applied to."""
    seen = []

    def watched(applied: Any, *args: Any) -> Any:
        if applied is function:
            seen.append(args)
        return written_out.applied(applied, *args)

    monkeypatch.setattr(f"{function.__module__}.applied", watched)
    return seen


def twice(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    needed: Sequence[bool] = (True, True, True),
    along: Sequence[int] = (0, 1, 2),
    *,
    with_zeros: bool = True,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """The value, the gradients, and the gradients of these, along some of them, with zeros or None for what is none."""
    generator = torch.Generator().manual_seed(0)
    inputs = [each.clone().requires_grad_(is_needed) for each, is_needed in zip(inputs, needed, strict=True)]
    y = function(*inputs)

    def drawn(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(y.dtype)

    g = drawn(y).requires_grad_()
    wanted = [each for each in inputs if each.requires_grad]
    gradients = torch.autograd.grad(y, wanted, g, create_graph=True)
    directions = [drawn(each) for each in gradients]
    followed = [i for i in along if gradients[i].requires_grad]
    second = torch.autograd.grad(
        [gradients[i] for i in followed],
        [g, *wanted],
        [directions[i] for i in followed],
        allow_unused=True,
        materialize_grads=with_zeros,
    )
    return y, gradients, second


def squares(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def found_by(model: nn.Module, *shape: int, written_out: bool) -> Found:
    """What a pass finds on a batch of this shape."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    problem = Problem(model, squares, AdaHessian(model.parameters(), num_probes=2))
    return double_backward(problem, written_out=written_out)(x, problem.draw, False)


def assert_found_alike(model: nn.Module, *shape: int, applications: list[Any]) -> None:
    """A pass finds what torch's own finds, and by what is written out."""
    torchs = found_by(model, *shape, written_out=False)
    assert not applications
    torch.testing.assert_close(found_by(model, *shape, written_out=True), torchs)
    assert applications
