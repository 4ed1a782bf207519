"""A pass of its own that measures the curvature: when it is due, on which part of the batch, and with whom."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from adahessian.curvature.accumulation import Measured, WeightedMean
from adahessian.curvature.batches import slice_batch
from adahessian.curvature.stopwatch import Stopwatch
from adahessian.distributed import Ranks, ranks_of, refuse_flattened, unwrapped
from adahessian.settings import is_integer, is_number
from adahessian.sharding import is_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from adahessian.optimizer import AdaHessian
    from adahessian.sparse import DenseAndSparse

Model = TypeVar("Model", bound=nn.Module)


class CurvaturePass(ABC, Generic[Model]):
    """Measures the curvature for an optimizer whenever that wants it.

    Args:
        model: The model.
        function: What is computed from the model and a batch.
        optimizer: The optimizer that uses the curvature and says when it is due.
        batch_fraction: Share of each batch to measure on, above 0 and up to 1: its first examples.
        batch_dim: The dimension of the batch's tensors that counts examples.
        accumulate: Whether all measurements until the next step count, by their mean, or the first alone.
        process_group: The processes whose gradients are averaged; ``"auto"`` asks the model's wrapper.

    Raises:
        TypeError: If the model, the function or the optimizer is none.
        ValueError: If an argument is out of its range, or the model's wrapper is not known.
    """

    # The name under which users hand over the function.
    function_name: ClassVar[str] = "loss_fn"

    def __init__(
        self,
        model: Model,
        function: Any,
        optimizer: AdaHessian | DenseAndSparse,
        *,
        batch_fraction: float,
        batch_dim: int,
        accumulate: bool,
        process_group: ProcessGroup | Literal["auto"] | None,
    ) -> None:
        # Trainers wrap optimizers. A wrapper would keep to itself what is set on it.
        while hasattr(inner := getattr(optimizer, "optimizer", None), "step"):
            optimizer = cast("AdaHessian | DenseAndSparse", inner)
        if isinstance(model, nn.Module):
            refuse_flattened(model)
        if not isinstance(model, nn.Module) or not callable(function) or not hasattr(optimizer, "feed_curvature"):
            found = ", ".join(type(each).__name__ for each in (model, function, optimizer))
            raise TypeError(
                f"{type(self).__name__} takes (model, {self.function_name}, optimizer): a torch.nn.Module, a function "
                f"of the model and a batch, and an AdaHessian, but got {found}"
            )
        _refuse_other_arguments(self.function_name, function)
        if not (is_number(batch_fraction) and 0 < batch_fraction <= 1):
            raise ValueError(f"Invalid batch_fraction: {batch_fraction!r}. It must be above 0 and at most 1.")
        if not (is_integer(batch_dim) and batch_dim >= 0):
            raise ValueError(f"Invalid batch_dim: {batch_dim!r}. It must be an integer, 0 or more.")
        if not isinstance(accumulate, bool):
            raise ValueError(f"Invalid accumulate value: {accumulate!r}. It must be True or False.")
        self.ranks: Ranks | None = ranks_of(model, process_group)
        self.model = cast(Model, unwrapped(model))
        self.optimizer = optimizer
        self.batch_fraction = batch_fraction
        self.batch_dim = batch_dim
        self.accumulate = accumulate
        self._mean: WeightedMean | None = None
        self._stopwatch = Stopwatch()

    @property
    def seconds(self) -> float:
        """The time that :meth:`measure` has taken so far. Reading waits for the device."""
        return self._stopwatch.seconds

    def measure(self, batch: Any, *, weight: float = 1.0) -> bool:
        """Measure the curvature on a slice of the batch, if a measurement is due.

        Call it before ``optimizer.step()``, which uses the measurement. Save checkpoints after the step: a measurement
        that no step has used yet is not part of the optimizer's state. With several processes all of them call it.

        Args:
            batch: Tensors, or tuples, lists and dicts of them.
            weight: What this batch counts in the mean over processes and micro-batches: the number of its tokens
                where the objective is a mean over the tokens of all of them. A mean of means, which is what
                averaged gradients belong to, takes equal weights.

        Returns:
            Whether it measured.

        Raises:
            CurvatureError: If the curvature cannot be had from this model. Nothing has changed then. Of several
                processes the others wait for this one: let it end.
            ValueError: If the batch cannot be sliced, or the weight is negative.
        """
        if not (is_number(weight) and 0 <= weight < math.inf):
            raise ValueError(f"Invalid weight: {weight!r}. It must be a finite number, 0 or more.")
        if not self.optimizer.curvature_due and not self._goes_on:
            return False
        part = slice_batch(batch, self.batch_fraction, self.batch_dim)
        with self._stopwatch.running(next((param.device for param in self.model.parameters()), torch.device("cpu"))):
            self._measure(part, weight)
        return True

    def feed(
        self, diagonal: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, weight: float = 1.0
    ) -> None:
        """Hand a measurement over to the optimizer, once it is that of all ranks and micro-batches.

        Args:
            diagonal: Signed diagonals in the order of the optimizer's ``measured_parameters()``.
            gradients: The gradients of the same loss.
            weight: What it counts in a mean.
        """
        params = self.optimizer.measured_parameters()
        ranks = self._ranks_to_ask
        if ranks is None and not self.accumulate:
            self.optimizer.feed_curvature(
                {param: values for param, values in zip(params, diagonal, strict=True) if values is not None},
                {param: values for param, values in zip(params, gradients, strict=True) if values is not None},
            )
            return
        if self._mean is None or not self._goes_on:
            in_shards = any(values is not None and is_sharded(values) for values in diagonal)
            self._mean = WeightedMean(params, self.optimizer.measured_blocks(of_shards=in_shards))
        if list(map(id, params)) != list(map(id, self._mean.params)):
            raise ValueError(
                "parameters were frozen, thawed or added between the micro-batches of a step: do that after "
                "optimizer.step()"
            )
        self._mean.add(diagonal, gradients, weight)
        if self.accumulate:
            self.optimizer.await_curvature(self._complete)
        else:
            self.optimizer.feed_curvature(*self._complete())

    @property
    def _goes_on(self) -> bool:
        """Whether what comes before the next step belongs to a measurement that has been begun."""
        return self.accumulate and self.optimizer.awaits(self._complete)

    @property
    def _ranks_to_ask(self) -> Ranks | None:
        """The ranks whose diagonals are to be averaged with those of this one."""
        return self.ranks

    def _complete(self) -> Measured:
        mean, self._mean = self._mean, None
        assert mean is not None
        return mean.result(self._ranks_to_ask)

    @abstractmethod
    def _measure(self, part: Any, weight: float) -> None:
        """Measure on this part of a batch, and feed what was found."""


def _refuse_other_arguments(name: str, function: Any) -> None:
    """Refuse a function that does not take a model and a batch, such as a loss of torch.nn."""
    try:
        inspect.signature(function).bind(object(), object())
    except ValueError:  # one that Python knows nothing about
        return
    except TypeError as error:
        raise TypeError(
            f"{name} is called as {name}(model, batch), but this one takes other arguments: {error}"
        ) from error
    if isinstance(function, nn.modules.loss._Loss):
        raise TypeError(
            f"{name} is called as {name}(model, batch), but {type(function).__name__} takes outputs and targets: write "
            f"lambda model, batch: {type(function).__name__}()(model(batch[0]), batch[1])"
        )
