"""The ways to the second derivatives of a loss, each from a part of a batch to what was found there."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from adahessian.curvature import (
    batch_norm,
    eager_attention,
    eager_batch_norm,
    eager_convolution,
    eager_gelu,
    eager_layer_norm,
    eager_lstm,
)
from adahessian.curvature.attention import plain_attention
from adahessian.curvature.backends import twice_differentiable
from adahessian.curvature.batches import signature
from adahessian.curvature.compilation import Compiled
from adahessian.curvature.errors import CurvatureError, explained
from adahessian.curvature.finite_difference import check_smooth, finite_difference_product, relative_step
from adahessian.curvature.functional import FunctionalLoss, Product
from adahessian.curvature.graph import check_twice_differentiable
from adahessian.curvature.hutchinson import hessian_diagonal
from adahessian.curvature.isolation import (
    buffers_kept_on_success,
    devices_of,
    model_untouched,
    random_streams_untouched,
)
from adahessian.curvature.replaced import Replaced, replaced_by_name
from adahessian.curvature.written_out import Pass
from adahessian.sharding import whole_parameters

if TYPE_CHECKING:
    from adahessian.optimizer import AdaHessian
    from adahessian.sparse import DenseAndSparse

# The probes, by number.
Draw = Callable[[int], Sequence[Tensor]]


class Found(NamedTuple):
    """What a pass has found, in the order of the parameters. One that took no part in the loss has None."""

    loss: Tensor
    gradients: list[Tensor | None]
    diagonal: list[Tensor | None]


# From a part of a batch, the probes, and whether the model keeps what the pass did to its buffers, as training does.
Way = Callable[[Any, Draw, bool], Found]


@dataclass(frozen=True)
class Problem:
    """A loss to be differentiated by an optimizer's parameters."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    optimizer: AdaHessian | DenseAndSparse
    # What probes are multiplied by. The diagonal is too large by its square.
    probe_scale: Callable[[], float] = lambda: 1.0
    # The whole of each parameter that is spread over ranks, as long as every rank has it.
    wholes: dict[Tensor, Tensor] = field(default_factory=dict)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all of the model on this rank."""
        with whole_parameters(self.model) as wholes:
            self.wholes.update(wholes)
            try:
                yield
            finally:
                self.wholes.clear()

    @property
    def parameters(self) -> list[Tensor]:
        """What to differentiate by."""
        return [self.wholes.get(param, param) for param in self.optimizer.measured_parameters()]

    def draw(self, probe: int) -> list[Tensor]:
        """A probe of the measurement that is due."""
        drawn, scale = self.optimizer.draw_probes(probe), self.probe_scale()
        return drawn if scale == 1 else [scale * sign for sign in drawn]

    def functional(self) -> FunctionalLoss:
        """The loss as a function of the parameters."""
        return FunctionalLoss(self.model, self.loss_fn, self.parameters)

    def random_streams_untouched(self) -> AbstractContextManager[None]:
        """Put back what is drawn inside."""
        return random_streams_untouched(devices_of(self.model))


def double_backward(problem: Problem, *, written_out: bool = True, make_pass: Callable[[], Pass] = Pass) -> Way:
    """On the model itself, as it is: the way that always works.

    Args:
        problem: The loss.
        written_out: Whether convolutions, norms, attention, LSTMs and GELU have their second derivatives written out,
            and not by torch.
        make_pass: Makes the pass that decides, for each of them, whether that can be done.
    """

    def compute(part: Any, draw: Draw, keep_buffers: bool) -> Found:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(twice_differentiable(problem.model))
            stack.enter_context(
                buffers_kept_on_success(problem.model) if keep_buffers else model_untouched(problem.model)
            )
            this = stack.enter_context(make_pass())
            if written_out:
                stack.enter_context(replaced_by_name(_written_out(this)))
            loss = problem.loss_fn(problem.model, part)
            _check(loss)
            params = problem.parameters
            this.is_at_gradient = True
            with explained():
                gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
            if all(gradient is None for gradient in gradients):
                raise CurvatureError("the loss depends on none of the optimizer's parameters: is this its model?")
            diagonal = hessian_diagonal(gradients, params, draw, problem.optimizer.num_probes)
        return Found(loss.detach(), [g if g is None else g.detach() for g in gradients], diagonal)

    return compute


def _written_out(of_pass: Pass) -> list[tuple[Any, str, Callable[..., Any]]]:
    """What torch differentiates twice by many small operations, or by slow ones."""
    instead: list[tuple[Any, str, Callable[..., Any]]] = [
        *((nn.functional, f"conv{dims}d", eager_convolution.convolution(dims)) for dims in (1, 2, 3)),
        (nn.functional, "batch_norm", eager_batch_norm.batch_norm),
        (nn.functional, "layer_norm", eager_layer_norm.layer_norm),
        (nn.functional, "scaled_dot_product_attention", eager_attention.attention),
        (torch._VF, "lstm", eager_lstm.lstm),
        (nn.functional, "gelu", eager_gelu.gelu),
    ]
    return [(module, name, partial(function, of_pass)) for module, name, function in instead]


def uncompiled(problem: Problem, product: Product) -> Compiled:
    """What :func:`adahessian.curvature.compilation.compile_derivatives` compiles, as it is."""
    loss = problem.functional()
    return lambda params, buffers, probe, part: loss.derivatives(product, params, buffers, probe, part)


class Unused:
    """The parameters that take no part in a loss, found by an ordinary gradient, once for each kind of batch.

    ``torch.func`` has zeros for them. They are None everywhere else, and stay as they are.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[Hashable, frozenset[int]] = {}

    def __call__(self, part: Any) -> frozenset[int]:
        """Their numbers."""
        kind = self._kind(part)
        if kind is None:
            return self._find(part)
        if kind not in self._known:
            self._known[kind] = self._find(part)
        return self._known[kind]

    def found_used(self, part: Any, used: Container[int]) -> None:
        """Correct what is known: these take part after all."""
        kind = self._kind(part)
        if kind in self._known:
            self._known[kind] = frozenset(i for i in self._known[kind] if i not in used)

    def _kind(self, part: Any) -> Hashable | None:
        modes = tuple(module.training for module in self._problem.model.modules())
        try:
            return signature(part), modes
        except TypeError:
            return None

    def _find(self, part: Any) -> frozenset[int]:
        problem = self._problem
        with torch.enable_grad(), model_untouched(problem.model), problem.random_streams_untouched():
            loss = problem.loss_fn(problem.model, part)
            gradients = torch.autograd.grad(loss, problem.parameters, allow_unused=True)
        return frozenset(i for i, gradient in enumerate(gradients) if gradient is None)


def functional(problem: Problem, function: Compiled, *, compiled: bool, plain_batch_norm: bool = False) -> Way:
    """By a function of the parameters, a pass for each probe.

    Args:
        problem: The loss.
        function: Its derivatives.
        compiled: Whether these are compiled.
        plain_batch_norm: Whether batch norm is computed by :mod:`adahessian.curvature.batch_norm`.
    """
    unused_in = Unused(problem)

    def compute(part: Any, draw: Draw, keep_buffers: bool) -> Found:
        unused = unused_in(part)
        params = [param.detach() for param in problem.parameters]
        buffers = {f"model.{name}": buffer for name, buffer in problem.model.named_buffers()}
        probes = problem.optimizer.num_probes
        first_probe = draw(0)  # here: a draw has nothing to do with the modes below, which see every operation
        with (
            torch.no_grad(),
            twice_differentiable(problem.model, compiled=compiled),
            plain_attention(),
            Replaced({batch_norm.TORCHS_OWN: batch_norm.batch_norm}) if plain_batch_norm else nullcontext(),
        ):
            others = []
            for probe in range(1, probes):
                # All passes draw the random numbers that the last one, which comes next, is to draw.
                with nullcontext() if _is_capturing() else problem.random_streams_untouched():
                    others.append(function(params, buffers, draw(probe), part)[2])
            loss, gradients, diagonal, after = function(params, buffers, first_probe, part)
            for other in others:
                torch._foreach_add_(diagonal, other)
            if others:
                torch._foreach_div_(diagonal, probes)
            if unused and not _is_capturing() and not _is_waiting_forbidden():
                # Which way the model went may depend on the data: a gradient is proof of a part in the loss.
                used = {i for i in unused if gradients[i].any()}
                if used:
                    unused_in.found_used(part, used)
                    unused = unused - used
            if keep_buffers and buffers:
                torch._foreach_copy_(list(buffers.values()), [after[name] for name in buffers])
        return Found(loss, _without(gradients, unused), _without(diagonal, unused))

    return compute


def finite_difference(problem: Problem) -> Way:
    """By ordinary gradients on both sides of the parameters."""

    def compute(part: Any, draw: Draw, keep_buffers: bool) -> Found:
        function = problem.functional()
        params = [param.detach() for param in problem.parameters]

        def loss_at(place: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
            leaves = [tensor.detach().requires_grad_() for tensor in place]
            loss, _ = functional_call(function, dict(zip(function.names, leaves, strict=True)), (part,))
            return loss, leaves

        def gradient(place: Sequence[Tensor]) -> list[Tensor | None]:
            # Every pass draws the same random numbers.
            with model_untouched(problem.model), problem.random_streams_untouched():
                loss, leaves = loss_at(place)
                return list(torch.autograd.grad(loss, leaves, allow_unused=True))

        with torch.enable_grad(), twice_differentiable(problem.model), _without_tf32():
            with model_untouched(problem.model), problem.random_streams_untouched():
                loss, _ = loss_at(params)
                _check(loss)
                check_smooth(loss)
                step = relative_step(loss)
            probes = [draw(probe) for probe in range(problem.optimizer.num_probes)]
            products = [finite_difference_product(gradient, params, probe, step) for probe in probes]
            with nullcontext() if keep_buffers else model_untouched(problem.model):
                loss, leaves = loss_at(params)
                gradients: list[Tensor | None] = list(torch.autograd.grad(loss, leaves, allow_unused=True))
        diagonal: list[Tensor | None] = []
        for i, gradient_here in enumerate(gradients):
            along = [
                z[i] * p for z, p in zip(probes, (product[i] for product in products), strict=True) if p is not None
            ]
            diagonal.append(None if gradient_here is None else torch.stack(along).mean(0))
        return Found(loss.detach(), gradients, diagonal)

    return compute


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Convolutions in float32: a difference of gradients has no digits to spare."""
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        yield
    finally:
        convolutions.fp32_precision = before


def _is_waiting_forbidden() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_sync_debug_mode() == 2


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _without(values: Sequence[Tensor], unused: Container[int]) -> list[Tensor | None]:
    return [None if i in unused else value for i, value in enumerate(values)]


def _check(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise CurvatureError(f"loss_fn must return the loss alone, as a tensor, but returned a {type(loss).__name__}")
    if loss.numel() != 1 or loss.is_complex():
        raise CurvatureError(
            f"loss_fn must return a real scalar, but returned a {loss.dtype} tensor of shape {tuple(loss.shape)}: "
            "reduce it with .mean()"
        )
    if not loss.requires_grad:
        raise CurvatureError(
            "the loss has no graph: loss_fn must compute it from the model's parameters, without torch.no_grad(), "
            "torch.inference_mode(), .detach() or .item(), and at least one parameter must require a gradient"
        )
    check_twice_differentiable([loss], of_loss=True)
