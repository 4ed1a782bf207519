"""The engine: chooses how the second derivatives of a loss are computed, and checks its choice once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from adahessian.curvature.agreement import Reference, UnfitError, agreement, errors, reference
from adahessian.curvature.compilation import WORTH_COMPILING, compile_derivatives, missing_compiler
from adahessian.curvature.errors import CurvatureError, explained
from adahessian.curvature.functional import Product
from adahessian.curvature.isolation import remembered, transforms_closed
from adahessian.curvature.kinds import Kinds
from adahessian.curvature.sync_batch_norm import communicates
from adahessian.curvature.ways import (
    Draw,
    Found,
    Problem,
    Way,
    double_backward,
    finite_difference,
    functional,
    uncompiled,
)
from adahessian.curvature.written_out import Watched
from adahessian.messages import compiling, say, say_once

ProductName = Literal["auto", "double_backward", "forward_over_reverse", "finite_difference"]
PRODUCTS: tuple[str, ...] = get_args(ProductName)

# What the same pass may differ by from call to call, in norm: kernels may add in another order.
_STEADY = 1e-3


class Choice(NamedTuple):
    """A way to compute second derivatives, and how the user is told of it."""

    name: str
    compute: Way
    is_compiled: bool = False


class Engine:
    """Second derivatives of a loss, by the fastest way that works for it.

    Compiled as one function, forward over reverse is the fastest; then comes compiled double backward. Without the
    compiler double backward is as fast as any way, and takes the least memory. Whatever is chosen, unless it is torch's
    double backward itself, is compared with that on the first batch.

    Args:
        problem: The loss, and the parameters to differentiate it by.
        product: The way to the product, or ``"auto"``.
        compile: Whether to compile the pass; None does so on a GPU, for models that are large enough.
        tangent_dtype: What a compiled pass rounds the operands of products to that only feed ``H z``.
    """

    def __init__(
        self, problem: Problem, *, product: ProductName, compile: bool | None, tangent_dtype: torch.dtype | None
    ) -> None:
        self.product = product
        self._problem = problem
        self._compile = compile
        self._tangent_dtype = tangent_dtype
        self._kinds = Kinds()
        self._compiled_for: set[Hashable] = set()
        # What to use once nothing is to be compared any more, and the functions that have been.
        self._double_backward = double_backward(problem)
        self._compared: set[type] = set()
        self._is_settled = False
        self._asks_ranks = False
        self._choice: Choice | None = None
        self._chosen_for: list[Tensor] = []

    def choice(self, part: Any) -> Choice:
        """How this part of a batch, and all that follow, are computed; made when it is first asked for."""
        params = self._problem.optimizer.measured_parameters()
        # Parameters that were frozen, thawed or added since ask for another function.
        if self._choice is None or list(map(id, params)) != list(map(id, self._chosen_for)):
            with self._problem.random_streams_untouched():
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
        if not choice.is_compiled:
            return choice.compute(part, draw, keep_buffers)
        kind = self._kinds.key(part)
        if kind is not None and (kind in self._compiled_for or self._compile_for(kind, part)):
            try:
                with transforms_closed():
                    return choice.compute(part, draw, keep_buffers)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a Python number that changes is compiled anew, until the compiler has enough
                self._do_without(kind, error)
        return self._by_double_backward(part, draw, keep_buffers)

    def way(self, part: Any) -> Way:
        """How to compute on batches of this kind, compiled by now if that works: for what is to be captured."""
        choice = self.choice(part)
        if choice.is_compiled:
            kind = self._kinds.key(part, at_once=True)
            if kind is not None and (kind in self._compiled_for or self._compile_for(kind, part)):
                return choice.compute
        elif choice.compute != self._by_double_backward:
            return choice.compute
        if not self._is_settled:
            with self._problem.random_streams_untouched():
                self._by_double_backward(part, self._problem.draw, False)
        return self._double_backward

    def _compile_for(self, kind: Hashable, part: Any) -> bool:
        """Compile for a kind of batch; whether that works."""
        choice = self.choice(part)
        try:
            if self._compiled_for:  # for the first kind the choice itself has done it
                with (
                    compiling("the curvature pass for another kind of batch"),
                    self._problem.random_streams_untouched(),
                    transforms_closed(),
                ):
                    choice.compute(part, self._problem.draw, False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler stumbles over
            self._do_without(kind, error)
            return False
        self._compiled_for.add(kind)
        return True

    def _do_without(self, kind: Hashable, error: Exception) -> None:
        say(f"from now on not compiled for this kind of batch: {first_line(error)}")
        self._compiled_for.discard(kind)
        self._kinds.refuse(kind)

    def measure(self, part: Any) -> Found:
        """Measure on a part of a batch. Nothing is changed."""
        with self._problem.random_streams_untouched():
            return self.compute(part, self._problem.draw, keep_buffers=False)

    def measure_plainly(self, part: Any) -> Found:
        """The same by double backward, without choosing anything."""
        with self._problem.random_streams_untouched():
            return self._double_backward(part, self._problem.draw, False)

    @property
    def chooses_by_comparison(self) -> bool:
        """Whether the choice is still to be made, between exact products."""
        return self._choice is None and self.product != "finite_difference"

    def pass_by(self) -> None:
        """Take note of a measurement that was made without asking, of a batch of a kind that is compiled for."""
        self._kinds.pass_by()

    def wants_compiled(self) -> tuple[bool, str]:
        """Whether to compile, and why not."""
        params = self._problem.parameters
        if not params:
            return False, "no parameter requires a gradient"
        device = params[0].device
        if self._compile is False:
            return False, "compile=False"
        if self._compile is None:
            if device.type != "cuda":
                return False, "compile=True would compile it on this device, too"
            if sum(param.numel() for param in params) < WORTH_COMPILING:
                return False, f"fewer than {WORTH_COMPILING} parameters do not repay the minute it takes"
        missing = missing_compiler(device)
        return missing is None, missing or ""

    def _choose(self, part: Any) -> Choice:
        why_not = self._why_not_functional()
        if why_not is not None and self.product in ("forward_over_reverse", "finite_difference"):
            raise CurvatureError(f"no {_in_words(self.product)}: {why_not}. Remedy: product='auto'.")
        if self.product == "finite_difference":
            return self._checked(part, finite_difference(self._problem), reference(self._problem, part))
        wanted, why_eager = self.wants_compiled()
        if why_not is None and (wanted or self.product == "forward_over_reverse"):
            expected = reference(self._problem, part)
            failures = []
            for product, channels_last in self._candidates() if wanted else ():
                try:
                    return self._try_compiled(part, product, channels_last, expected)
                except UnfitError as unfit:
                    failures.append(f"{_in_words(product)}: {unfit}")
                    say(f"not by compiled {failures[-1]}")
            why_eager = "; ".join(failures) or why_eager
            if self.product == "forward_over_reverse":
                way = functional(self._problem, uncompiled(self._problem, self.product), compiled=False)
                return self._checked(part, way, expected)
        if self._tangent_dtype is not None:
            say_once("tangent_dtype has no effect, as the pass is not compiled")
        self._double_backward, self._compared, self._is_settled = double_backward(self._problem), set(), False
        self._asks_ranks = communicates(self._problem.model)
        return Choice(f"double backward, not compiled: {why_not or why_eager}", self._by_double_backward)

    def _by_double_backward(self, part: Any, draw: Draw, keep_buffers: bool) -> Found:
        """By double backward. What is written out is compared with torch's own when it first takes part."""
        if not self._is_settled and self._asks_ranks:
            # Ranks are to run the same passes, whatever takes part on each: it is compared once and for all.
            if (unfit := self._unfit(part, set())) is not None:
                self._leave_all_to_torch(unfit)
            self._is_settled = True
        if self._is_settled:
            return self._double_backward(part, draw, keep_buffers)
        return self._watched_double_backward(part, draw, keep_buffers)

    def _watched_double_backward(self, part: Any, draw: Draw, keep_buffers: bool) -> Found:
        problem, watched = self._problem, Watched()
        put_back: Callable[[], None] = (
            (lambda: None) if self._compared else remembered(problem.model, buffers=keep_buffers)
        )
        unfit: Exception | None = None
        try:
            found = double_backward(problem, make_pass=lambda: watched)(part, draw, keep_buffers)
            if not watched.took_part <= self._compared:
                unfit = self._unfit(part, watched.took_part)
        except torch.OutOfMemoryError:
            put_back()
            raise
        except Exception as error:  # whatever they stumble over
            unfit = error
        if unfit is not None:
            put_back()
            # An error of the user's own comes again here.
            found = double_backward(problem, written_out=False)(part, draw, keep_buffers)
            self._leave_all_to_torch(unfit)
        return found

    def _unfit(self, part: Any, took_part: set[type]) -> Exception | None:
        """What is wrong with the second derivatives that are written out, beside torch's, if anything is."""
        problem = self._problem
        try:
            expected = reference(problem, part)
        except CurvatureError:  # what torch itself gets wrong, as the gradients of norms
            expected = None
        if expected is not None and not expected.is_finite:
            return None  # to be compared on another batch
        self._compared |= took_part
        if expected is None:
            return None
        written_out = double_backward(problem)
        try:
            with problem.random_streams_untouched():
                found = written_out(part, problem.draw, False)
            agreement(problem, part, found, written_out, expected, rounded=False, compiled=False)
        except torch.OutOfMemoryError:
            raise
        except Exception as unfit:  # whatever they stumble over
            if not (isinstance(unfit, UnfitError) and self._differs_from_call_to_call(part, expected)):
                return unfit
            say_once(
                "the loss has another curvature at each call, on the same batch: does the model keep a state that is "
                "no buffer? Then each measurement advances it: give it to loss_fn with the batch"
            )
        return None

    def _leave_all_to_torch(self, why: Exception) -> None:
        say(f"all is left to torch, as layers that are written out do not agree with it: {first_line(why)}")
        self._double_backward = double_backward(self._problem, written_out=False)
        self._is_settled = True

    def _differs_from_call_to_call(self, part: Any, expected: Reference) -> bool:
        again = reference(self._problem, part)
        return again is not None and errors(again.diagonal, expected.diagonal)[0] > _STEADY

    def _why_not_functional(self) -> str | None:
        """Why the loss cannot be taken for a function of the optimizer's parameters, if it cannot."""
        own = set(map(id, self._problem.model.parameters()))
        if any(id(param) not in own for param in self._problem.parameters):
            return "the optimizer has parameters that are not the model's"
        if any(param.is_complex() for param in self._problem.parameters):
            return "the model has complex parameters"
        if communicates(self._problem.model):
            return "SyncBatchNorm asks other processes"
        return None

    def _candidates(self) -> Iterator[tuple[Product, bool]]:
        """Products to compile, the fastest first, and whether to bring images into another order of memory."""
        products: Sequence[Product] = ("forward_over_reverse", "double_backward")
        if self.product != "auto":
            products = (cast(Product, self.product),)
        for product in products:
            if any(param.dim() == 4 and param.is_cuda for param in self._problem.parameters):
                yield product, True
            yield product, False

    def _try_compiled(self, part: Any, product: Product, channels_last: bool, expected: Reference | None) -> Choice:
        problem = self._problem
        function = compile_derivatives(
            problem.functional(), product, tangent_dtype=self._tangent_dtype, channels_last=channels_last
        )
        way = functional(problem, function, compiled=True, plain_batch_norm=True)
        try:
            with (
                compiling(f"the curvature pass ({_in_words(product)})"),
                problem.random_streams_untouched(),
                transforms_closed(),
            ):
                found = way(part, problem.draw, False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler stumbles over
            raise UnfitError(first_line(error)) from error
        plain = functional(problem, uncompiled(problem, product), compiled=False, plain_batch_norm=True)
        words = agreement(problem, part, found, plain, expected, rounded=self._tangent_dtype is not None, compiled=True)
        return Choice(f"compiled {_in_words(product)}, {words}", way, is_compiled=True)

    def _checked(self, part: Any, way: Way, expected: Reference | None) -> Choice:
        """A way that the user has named."""
        rounded = self.product == "finite_difference"
        try:
            with self._problem.random_streams_untouched(), explained():
                found = way(part, self._problem.draw, False)
        except CurvatureError as error:
            if rounded:
                raise
            raise CurvatureError(f"no {_in_words(self.product)}: {error} Or take product='auto'.") from error
        try:
            words = agreement(self._problem, part, found, way, expected, rounded=rounded, compiled=False)
        except UnfitError as unfit:
            raise CurvatureError(f"no {_in_words(self.product)}: {unfit}. Remedy: product='auto'.") from unfit
        return Choice(f"{_in_words(self.product)}, {words}", way)


def _in_words(product: str) -> str:
    return product.replace("_", " ")


def first_line(error: Exception) -> str:
    """An error in one line."""
    error = getattr(error, "inner_exception", error)  # what the compiler's backend stumbled over
    line = next((line[:200] for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, UnfitError) else f"{type(error).__name__}: {line}"
