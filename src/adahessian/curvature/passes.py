"""A pass of its own that measures the curvature: when it is due, and on which part of the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adahessian.curvature.batches import slice_batch
from adahessian.settings import is_integer, is_number

if TYPE_CHECKING:
    from adahessian.optimizer import AdaHessian

Model = TypeVar("Model", bound=nn.Module)


class CurvaturePass(ABC, Generic[Model]):
    """Measures the curvature for an optimizer whenever that wants it.

    Args:
        model: The model.
        function: What is computed from the model and a batch.
        optimizer: The optimizer that uses the curvature and says when it is due.
        batch_fraction: Share of each batch to measure on, above 0 and up to 1: its first examples.
        batch_dim: The dimension of the batch's tensors that counts examples.

    Raises:
        TypeError: If the model, the function or the optimizer is none.
        ValueError: If ``batch_fraction`` or ``batch_dim`` is out of its range, or the model is shared by processes.
    """

    # The name under which users hand over the function.
    function_name: ClassVar[str] = "loss_fn"

    def __init__(
        self, model: Model, function: Any, optimizer: AdaHessian, *, batch_fraction: float, batch_dim: int
    ) -> None:
        if not isinstance(model, nn.Module) or not callable(function) or not hasattr(optimizer, "feed_curvature"):
            found = ", ".join(type(each).__name__ for each in (model, function, optimizer))
            raise TypeError(
                f"{type(self).__name__} takes (model, {self.function_name}, optimizer): a torch.nn.Module, a function "
                f"of the model and a batch, and an AdaHessian, but got {found}"
            )
        if not (is_number(batch_fraction) and 0 < batch_fraction <= 1):
            raise ValueError(f"Invalid batch_fraction: {batch_fraction!r}. It must be above 0 and at most 1.")
        if not (is_integer(batch_dim) and batch_dim >= 0):
            raise ValueError(f"Invalid batch_dim: {batch_dim!r}. It must be an integer, 0 or more.")
        if isinstance(model, DistributedDataParallel) and model.process_group.size() > 1:
            raise ValueError(
                f"{type(self).__name__} does not know yet how to average over processes: the ranks would drift apart"
            )
        self.model = model
        self.optimizer = optimizer
        self.batch_fraction = batch_fraction
        self.batch_dim = batch_dim

    def measure(self, batch: Any) -> bool:
        """Measure the curvature on a slice of the batch, if a measurement is due.

        Call it before ``optimizer.step()``, which uses the measurement. Save checkpoints after the step: a measurement
        that no step has used yet is not part of the optimizer's state.

        Args:
            batch: Tensors, or tuples, lists and dicts of them.

        Returns:
            Whether it measured.

        Raises:
            CurvatureError: If the curvature cannot be had from this model. Nothing has changed then.
            ValueError: If the batch cannot be sliced.
        """
        if not self.optimizer.curvature_due:
            return False
        self._measure(slice_batch(batch, self.batch_fraction, self.batch_dim))
        return True

    @abstractmethod
    def _measure(self, part: Any) -> None:
        """Measure on this part of a batch, and feed the optimizer."""
