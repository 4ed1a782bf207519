"""The engine: chooses how the second derivatives of a loss are computed, and checks its choice once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adahessian.curvature.backends import twice_differentiable
from adahessian.curvature.compilation import WORTH_COMPILING, Compiled, compile_derivatives, missing_compiler
from adahessian.curvature.errors import CurvatureError, explained
from adahessian.curvature.functional import FunctionalLoss, Product
from adahessian.curvature.graph import check_twice_differentiable
from adahessian.curvature.hutchinson import hessian_diagonal
from adahessian.curvature.isolation import devices_of, model_untouched, random_streams_untouched
from adahessian.curvature.kinds import Kinds
from adahessian.messages import compiling, say, say_once

if TYPE_CHECKING:
    from adahessian.optimizer import AdaHessian

ProductName = Literal["auto", "double_backward", "forward_over_reverse", "finite_difference"]
PRODUCTS: tuple[str, ...] = get_args(ProductName)

Draw = Callable[[int], Sequence[Tensor]]

# Largest error of a product, relative to double backward: of all parameters together, and of a single one. Rounding to
# tf32 or less moves units of ReLU networks across their kinks, and with them a few per cent of the product.
_EXACT_ENOUGH = {torch.float64: (1e-6, 1e-5), torch.float32: (1e-2, 5e-2)}
_REDUCED = (0.25, 0.5)


class Found(NamedTuple):
    """What a pass has found: the loss, its gradients and its Hessian diagonal, in the order of the parameters.

    A parameter that took no part in the loss has None.
    """

    loss: Tensor
    gradients: list[Tensor | None]
    diagonal: list[Tensor | None]


class Choice(NamedTuple):
    """A way to compute second derivatives, and the user's word for it."""

    name: str
    compute: Callable[[Any, Draw, bool], Found]
    is_compiled: bool


class Engine:
    """Second derivatives of a loss, by the fastest way that works for it.

    Compiled as one function, forward over reverse is the fastest; then comes compiled double backward. Without the
    compiler double backward is as fast as any way, and takes the least memory. Whatever is chosen, unless it is double
    backward itself, is compared with that on the first batch.

    Args:
        model: The model.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss.
        optimizer: The optimizer whose parameters count, and whose probes are drawn.
        product: The way to the product, or ``"auto"``.
        compile: Whether to compile the pass; None does so on a GPU, for models that are large enough.
        tangent_dtype: What a compiled pass rounds the operands of products to that only feed ``H z``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: AdaHessian,
        *,
        product: ProductName,
        compile: bool | None,
        tangent_dtype: torch.dtype | None,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.product = product
        self.compile = compile
        self.tangent_dtype = tangent_dtype
        self._choice: Choice | None = None
        self._chosen_for: list[Tensor] = []
        self._kinds = Kinds()

    def choice(self, part: Any) -> Choice:
        """How this part of a batch, and all that follow, are computed; made when it is first asked for."""
        params = self.optimizer.measured_parameters()
        # Parameters that were frozen, thawed or added since ask for another function.
        if self._choice is None or list(map(id, params)) != list(map(id, self._chosen_for)):
            with random_streams_untouched(devices_of(self.model)):
                self._choice = self._choose(part)
            self._chosen_for = params
            say_once(f"curvature by {self._choice.name}")
        return self._choice

    def compute(self, part: Any, draw: Draw, *, keep_buffers: bool) -> Found:
        """Gradients and diagonal on a part of a batch.

        Args:
            part: What ``loss_fn`` takes.
            draw: The probes, by number.
            keep_buffers: Whether the model keeps what the pass did to its buffers, as a step of training does.
        """
        choice = self.choice(part)
        if choice.is_compiled and self._kinds.key(part) is None:
            return self._double_backward(part, draw, keep_buffers)
        return choice.compute(part, draw, keep_buffers)

    def measure(self, part: Any) -> None:
        """Measure on a part of a batch and feed the optimizer. Nothing else is changed."""
        with random_streams_untouched(devices_of(self.model)):
            self.feed(self.compute(part, self.optimizer.draw_probes, keep_buffers=False))

    def feed(self, found: Found) -> None:
        """Hand what was found over to the optimizer."""
        params = self.optimizer.measured_parameters()
        self.optimizer.feed_curvature(_present(params, found.diagonal), _present(params, found.gradients))

    # The ways ------------------------------------------------------------------------------------------------------

    def _double_backward(self, part: Any, draw: Draw, keep_buffers: bool) -> Found:
        """On the model itself, as it is: the way that always works."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(twice_differentiable(self.model))
            if not keep_buffers:
                stack.enter_context(model_untouched(self.model))
            loss = self.loss_fn(self.model, part)
            _check(loss)
            params = self.optimizer.measured_parameters()
            with explained():
                gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
            if all(gradient is None for gradient in gradients):
                raise CurvatureError("the loss depends on none of the optimizer's parameters: is this its model?")
            diagonal = hessian_diagonal(gradients, params, draw, self.optimizer.num_probes)
        return Found(loss.detach(), [g if g is None else g.detach() for g in gradients], diagonal)

    def _functional(
        self, function: Compiled, *, compiled: bool, unused: Sequence[int]
    ) -> Callable[[Any, Draw, bool], Found]:
        """By a function of the parameters, once for each probe: the same pass, and so the same dropout, every time."""

        def compute(part: Any, draw: Draw, keep_buffers: bool) -> Found:
            params = [param.detach() for param in self.optimizer.measured_parameters()]
            buffers = {f"model.{name}": buffer for name, buffer in self.model.named_buffers()}
            probes = self.optimizer.num_probes
            with torch.no_grad(), twice_differentiable(self.model, compiled=compiled):
                others = [self._apart(function, params, buffers, draw(probe), part) for probe in range(1, probes)]
                found = function(params, buffers, draw(0), part)
                diagonal = found.diagonal
                for other in others:
                    torch._foreach_add_(diagonal, other)
                if others:
                    torch._foreach_div_(diagonal, probes)
                if keep_buffers and buffers:
                    torch._foreach_copy_(list(buffers.values()), [found.buffers[name] for name in buffers])
            return Found(found.loss, _without(found.gradients, unused), _without(diagonal, unused))

        return compute

    def _apart(self, function: Compiled, *arguments: Any) -> list[Tensor]:
        """The diagonal by a pass that draws the random numbers which the next one will draw."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return function(*arguments).diagonal
        with random_streams_untouched(devices_of(self.model)):
            return function(*arguments).diagonal

    # The choice ----------------------------------------------------------------------------------------------------

    def _choose(self, part: Any) -> Choice:
        plain = Choice("double backward", self._double_backward, is_compiled=False)
        why_not = self._why_not_functional()
        wants_compiled, why_eager = self.wants_compiled()
        if why_not is not None or (self.product in ("auto", "double_backward") and not wants_compiled):
            if why_not is not None and self.product == "forward_over_reverse":
                raise CurvatureError(f"no forward-over-reverse product: {why_not}. Remedy: product='auto'.")
            reason = why_not or why_eager
            return plain._replace(name=f"{plain.name}, not compiled: {reason}")
        reference = self._reference(part)
        products: tuple[Product, ...] = ("forward_over_reverse", "double_backward")
        if self.product != "auto":
            products = (self.product,)  # type: ignore[assignment]
        failures = []
        for product, channels_last in self._candidates(products) if wants_compiled else []:
            try:
                return self._try_compiled(part, product, channels_last, reference)
            except _UnfitError as unfit:
                failures.append(f"{_in_words(product)}: {unfit}")
                say(f"not by compiled {failures[-1]}")
        if self.product == "forward_over_reverse":
            return self._try_eager(part, reference)
        return plain._replace(name=f"{plain.name}, not compiled: {'; '.join(failures)}")

    def _candidates(self, products: Sequence[Product]) -> Iterator[tuple[Product, bool]]:
        params = self.optimizer.measured_parameters()
        convolutional = any(param.dim() == 4 and param.is_cuda for param in params)
        for product in products:
            if convolutional:
                yield product, True
            yield product, False

    def _why_not_functional(self) -> str | None:
        """Why the loss cannot be taken for a function of the optimizer's parameters, if it cannot."""
        own = set(map(id, self.model.parameters()))
        params = self.optimizer.measured_parameters()
        if any(id(param) not in own for param in params):
            return "the optimizer has parameters that are not the model's"
        if any(param.is_complex() for param in params):
            return "the model has complex parameters"
        return None

    def wants_compiled(self) -> tuple[bool, str]:
        """Whether to compile, and why not."""
        params = self.optimizer.measured_parameters()
        device = params[0].device
        if self.compile is False:
            return False, "as asked for"
        if self.compile is None:
            if device.type != "cuda":
                return False, "on this device only if compile=True asks for it"
            if sum(param.numel() for param in params) < WORTH_COMPILING:
                return (
                    False,
                    f"it takes a minute, which a model of fewer than {WORTH_COMPILING} parameters does not repay",
                )
        missing = missing_compiler(device)
        return missing is None, missing or ""

    def _try_compiled(self, part: Any, product: Product, channels_last: bool, reference: _Reference | None) -> Choice:
        loss = FunctionalLoss(self.model, self.loss_fn, self.optimizer.measured_parameters())
        function = compile_derivatives(loss, product, tangent_dtype=self.tangent_dtype, channels_last=channels_last)
        unused = reference.unused if reference is not None else ()
        compute = self._functional(function, compiled=True, unused=unused)
        try:
            with (
                compiling(f"the curvature pass ({_in_words(product)})"),
                random_streams_untouched(devices_of(self.model)),
            ):
                found = compute(part, self.optimizer.draw_probes, False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler stumbles over
            raise _UnfitError(first_line(error)) from error
        name = f"compiled {_in_words(product)}"
        agreement = self._agreement(found, part, product, reference)
        return Choice(f"{name}, {agreement}", compute, is_compiled=True)

    def _try_eager(self, part: Any, reference: _Reference | None) -> Choice:
        function = self._eager_function("forward_over_reverse")
        unused = reference.unused if reference is not None else ()
        compute = self._functional(function, compiled=False, unused=unused)
        with random_streams_untouched(devices_of(self.model)), explained():
            found = compute(part, self.optimizer.draw_probes, False)
        try:
            agreement = self._agreement(found, part, "forward_over_reverse", reference)
        except _UnfitError as unfit:
            raise CurvatureError(f"no forward-over-reverse product: {unfit}. Remedy: product='auto'.") from unfit
        return Choice(f"forward over reverse, {agreement}", compute, is_compiled=False)

    def _eager_function(self, product: Product) -> Compiled:
        loss = FunctionalLoss(self.model, self.loss_fn, self.optimizer.measured_parameters())
        return lambda params, buffers, probe, part: loss.derivatives(product, params, buffers, probe, part)

    # The check -----------------------------------------------------------------------------------------------------

    def _reference(self, part: Any) -> _Reference | None:
        """The diagonal by double backward, to compare with; None if it does not fit into memory."""
        devices = devices_of(self.model)
        try:
            with random_streams_untouched(devices):
                before = _random_states(devices)
                found = self._double_backward(part, self.optimizer.draw_probes, False)
                is_random = before != _random_states(devices)
        except torch.OutOfMemoryError:
            say("the curvature is not compared with that by double backward, which does not fit into memory")
            return None
        unused = tuple(i for i, gradient in enumerate(found.gradients) if gradient is None)
        return _Reference(found.diagonal, unused, is_random)

    def _agreement(self, found: Found, part: Any, product: Product, reference: _Reference | None) -> str:
        """How well a product agrees with double backward, in words.

        Raises:
            _UnfitError: If it does not.
        """
        if reference is None:
            return "not compared with double backward for want of memory"
        expected: Sequence[Tensor | None] = reference.diagonal
        if reference.is_random:
            # Compiled or not, random numbers may be drawn in another order: compare what is not compiled, without them.
            devices = devices_of(self.model)
            with random_streams_untouched(devices), _without_dropout(self.model):
                before = _random_states(devices)
                expected = self._double_backward(part, self.optimizer.draw_probes, False).diagonal
                compute = self._functional(self._eager_function(product), compiled=False, unused=reference.unused)
                found = compute(part, self.optimizer.draw_probes, False)
                if before != _random_states(devices):
                    return "not compared with double backward, as the loss is random even without dropout"
        overall, worst = _errors(found.diagonal, expected)
        bounds = _bounds(self.optimizer.measured_parameters(), self.tangent_dtype)
        if not (overall <= bounds[0] and worst <= bounds[1]):
            raise _UnfitError(
                f"it differs from double backward by {overall:.1%} in norm, {worst:.1%} for a single parameter: this "
                "version of torch differentiates an operation of the model wrongly"
            )
        return f"within {overall:.1g} of double backward"


class _UnfitError(Exception):
    """A way that does not work for this model."""


class _Reference(NamedTuple):
    diagonal: list[Tensor | None]
    unused: tuple[int, ...]
    is_random: bool


def _errors(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> tuple[float, float]:
    """The relative error of all parameters together, and the largest of a single one."""
    squares = [
        ((a.double() - b.double()).square().sum().item(), b.double().square().sum().item(), b.numel())
        for a, b in zip(found, expected, strict=True)
        if a is not None and b is not None
    ]
    total = sum(square for _, square, _ in squares)
    elements = sum(count for _, _, count in squares)
    if total == 0:
        return (0.0, 0.0) if all(error == 0 for error, _, _ in squares) else (math.inf, math.inf)
    # A parameter with next to no curvature is measured by a thousandth of the average one.
    worst = max(error / max(square, 1e-6 * total * count / elements) for error, square, count in squares if count)
    return math.sqrt(sum(error for error, _, _ in squares) / total), math.sqrt(worst)


def _bounds(params: Sequence[Tensor], tangent_dtype: torch.dtype | None) -> tuple[float, float]:
    """How large errors may be, by the precision that products are computed in."""
    dtypes = {param.dtype for param in params}
    if tangent_dtype is not None or len(dtypes) > 1 or dtypes.isdisjoint(_EXACT_ENOUGH):
        return _REDUCED
    (dtype,) = dtypes
    # On other devices than a CPU float32 is often tf32.
    on_cpu = all(param.device.type == "cpu" for param in params)
    return _EXACT_ENOUGH[dtype] if on_cpu or dtype == torch.float64 else _REDUCED


def _random_states(devices: set[torch.device]) -> list[bytes]:
    states = [torch.get_rng_state()]
    states += [torch.get_device_module(device).get_rng_state(device) for device in devices if device.type != "cpu"]
    return [bytes(state.numpy()) for state in states]


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Put all modules but those that count batches into evaluation mode: batch norm is to stay what it is."""
    training = [module for module in model.modules() if module.training and not isinstance(module, _NormBase)]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _present(params: Sequence[Tensor], values: Sequence[Tensor | None]) -> Mapping[Tensor, Tensor]:
    return {param: value for param, value in zip(params, values, strict=True) if value is not None}


def _without(values: Sequence[Tensor], unused: Sequence[int]) -> list[Tensor | None]:
    return [None if i in unused else value for i, value in enumerate(values)]


def _in_words(product: str) -> str:
    return product.replace("_", " ")


def first_line(error: Exception) -> str:
    """An error in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


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
            ".detach() or .item(), and at least one parameter must require a gradient"
        )
    check_twice_differentiable([loss])
