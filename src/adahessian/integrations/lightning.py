"""Lightning: a callback that measures the curvature before each training step that needs a measurement.

``docs/integrations.md`` shows how to use it, and what to do with manual optimization. If you use ``pytorch_lightning``
instead of ``lightning.pytorch``, import it first. They are separate packages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from adahessian.base.batches import map_tensors
from adahessian.base.errors import CurvatureError
from adahessian.curvature import Curvature
from adahessian.hessian.double_backward import Derivatives, Request
from adahessian.integrations.side_effects import attributes_restored
from adahessian.optimizer import AdaHessian


def _import_lightning() -> ModuleType:
    """Import the package that is in use, because neither package accepts the objects of the other."""
    for name in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules):
        with suppress(ModuleNotFoundError):
            return import_module(name)
    raise ImportError('Lightning is not installed. Run: pip install "adahessian[lightning]".')


if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    pl = _import_lightning()

_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))  # the curvature pass restores these itself


class CurvatureCallback(pl.Callback):
    """Callback that measures the curvature for the AdaHessian from ``configure_optimizers``.

    The measurement uses the Trainer's precision, gradient scaler and processes. With ``accumulate_grad_batches``, all
    batches of a step are measured. The callback adds nothing to checkpoints.

    Args:
        loss_fn: ``loss_fn(module, batch)`` returns the scalar loss, a mean over the batch. None uses the loss of
            ``training_step``. Both may log, update metrics and append to lists of the module, because all of this is
            undone. On a GPU, a function without metrics and lists is fastest, because only it can be compiled.
        curvature_options: Other arguments of :class:`adahessian.Curvature`, such as ``batch_fraction``.

    Raises:
        TypeError: When the fit starts, if the optimizer is not an AdaHessian.
        ValueError: When the fit starts, if the module optimizes manually or fetches its own batches.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor] | None = None, **curvature_options: Any) -> None:
        self._loss_fn = loss_fn
        self._options = curvature_options  # a separate line, so LightningCLI finds the options of Curvature
        self._curvature: Curvature[pl.LightningModule] | None = None
        self._batch_idx = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Create the curvature pass for the module, as wrapped by the strategy."""
        if not pl_module.automatic_optimization:
            raise ValueError(
                "CurvatureCallback needs automatic_optimization=True. With manual optimization, create an "
                "adahessian.Curvature in on_fit_start and call its measure(batch) in training_step."
            )
        self._curvature = Curvature(
            cast(Any, trainer.strategy.model),
            self._loss_fn or self._loss_of_training_step(pl_module),
            cast(AdaHessian, trainer.optimizers[0]),  # automatic optimization has only one
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **self._options,
        )
        measure = self._curvature.engine.measure

        def measure_without_traces(batch: Any, request: Request) -> Derivatives:
            with _side_effects_undone(pl_module), trainer.precision_plugin.train_step_context():
                return measure(map_tensors(Tensor.clone, batch), request)  # a step may write into its batch

        self._curvature.engine.measure = measure_without_traces  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Measure the curvature if it is due."""
        assert self._curvature is not None
        self._batch_idx = batch_idx
        try:
            self._curvature.measure(batch)
        except _NoLossError:
            if trainer.world_size > 1:  # the other ranks have a loss and would wait for this one
                raise

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Release the module."""
        self._curvature = None

    def _loss_of_training_step(self, module: pl.LightningModule) -> Callable[[pl.LightningModule, Any], Tensor]:
        has_parameter = pl.utilities.signature_utils.is_param_in_hook_signature
        if has_parameter(module.training_step, "dataloader_iter", explicit=True):
            raise ValueError(
                "training_step(dataloader_iter) fetches its own batches, so they cannot be measured first. Take a "
                "batch as its argument, or use manual optimization with adahessian.Curvature."
            )
        takes_index = has_parameter(module.training_step, "batch_idx", min_args=2)

        def loss_fn(module: pl.LightningModule, batch: Any) -> Tensor:
            output = module.training_step(batch, self._batch_idx) if takes_index else module.training_step(batch)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                raise _NoLossError("training_step returned no loss on this rank. Return a loss for every batch.")
            return loss

        return loss_fn


class _NoLossError(CurvatureError):
    """A batch without a loss, which Lightning will skip."""


@contextmanager
def _side_effects_undone(module: pl.LightningModule) -> Iterator[None]:
    """Disable logging, and undo changes to attributes, such as counters, lists of outputs and metric states."""
    trainer = module.trainer
    with ExitStack() as stack:
        stack.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [pl.loggers.logger.DummyLogger() for _ in trainer.loggers]
        for part in module.modules():
            stack.enter_context(attributes_restored(part, shared=_TORCH_ATTRIBUTES))
            if isinstance(part, pl.LightningModule):
                vars(part)["log"] = lambda *args, **kwargs: None  # log_dict calls it too
        yield
