"""Lightning: a callback that measures the curvature before a batch is trained on, whenever a measurement is due.

``training_step`` stays as it is. Its loss is computed once more, on a part of the batch, and that leaves no trace:
nothing is logged, and metrics, counters and lists of the module are afterwards as they were::

    import lightning as L
    import adahessian
    from adahessian.integrations.lightning import AdaHessianCallback

    class Classifier(L.LightningModule):
        ...
        def configure_optimizers(self):
            return adahessian.AdaHessian(adahessian.param_groups(self), lr=0.15, update_every=10, warmup_steps=200)

    trainer = L.Trainer(callbacks=AdaHessianCallback(batch_fraction=0.25))
    trainer.fit(Classifier(), loader)

With manual optimisation the measurement, too, is made by hand, and the loss is handed over as a function. The module
brings its callback along::

    class Classifier(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.curvature = AdaHessianCallback(lambda self, batch: self.loss(batch))

        def configure_callbacks(self):
            return [self.curvature]

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.curvature.measure(batch)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

Whoever writes ``import pytorch_lightning`` does so before this module is imported: the two names are two libraries.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from adahessian.curvature.errors import CurvatureError
from adahessian.curvature.measurement import Curvature
from adahessian.optimizer import AdaHessian
from adahessian.sparse import DenseAndSparse


def _library() -> ModuleType:
    """Lightning, by the name that is in use: objects of one of the two libraries are strangers to the other."""
    for name in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules):
        with suppress(ModuleNotFoundError):
            return import_module(name)
    raise ImportError('adahessian.integrations.lightning needs Lightning: pip install "adahessian[lightning]"')


if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    pl = _library()

# Attributes that every module has, and the curvature pass looks after.
_OF_TORCH = frozenset(vars(nn.Module()))


class AdaHessianCallback(pl.Callback):
    """Measures the curvature for the AdaHessian that ``configure_optimizers`` returns.

    Precision, gradient scaling and the processes of DDP are the Trainer's own. Schedulers, clipping, checkpoints and
    accumulated gradients work as with any other optimizer; checkpoints need nothing of the callback.

    Args:
        loss_fn: ``loss_fn(module, batch)`` returns the scalar loss, a mean over the batch. None takes that of
            ``training_step``. Either may log, update metrics and append to lists of the module: all of this is undone.
            What it does elsewhere, such as printing, it does at each measurement too. The compiled pass, the fastest
            on a GPU, wants a function without metrics and lists.
        optimizer: The place of the AdaHessian among what ``configure_optimizers`` returns, if it returns several.
        accumulate: Whether, with ``accumulate_grad_batches``, the curvature of all batches of a step is averaged, as
            their gradients are; otherwise it is measured on the first of them.
        **settings: All other settings of :class:`adahessian.Curvature`, such as ``batch_fraction``.

    Example:
        >>> callback = AdaHessianCallback(batch_fraction=0.25)
        >>> trainer = pl.Trainer(callbacks=[callback], barebones=True)
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        *,
        optimizer: int | None = None,
        accumulate: bool = True,
        **settings: Any,
    ) -> None:
        self._loss_fn = loss_fn
        self._place = optimizer
        self._settings = {"accumulate": accumulate, **settings}
        self._curvature: Curvature[pl.LightningModule] | None = None
        self._batch_idx = 0

    def measure(self, batch: Any, *, weight: float = 1.0) -> bool:
        """Measure the curvature on a part of the batch, if a measurement is due: in manual optimisation, by hand.

        Args:
            batch: What ``loss_fn`` takes.
            weight: What this batch counts in the mean over processes and accumulated batches.

        Returns:
            Whether it measured.

        Raises:
            CurvatureError: If the curvature cannot be had from this module.
            RuntimeError: If no Trainer is fitting with this callback.
        """
        if self._curvature is None:
            raise RuntimeError(
                "AdaHessianCallback.measure works during Trainer.fit, once the Trainer has the callback: hand it over "
                "by Trainer(callbacks=[...]), or return it from the module's configure_callbacks"
            )
        return self._curvature.measure(batch, weight=weight)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the optimizer, the processes and the precision."""
        wrapped: Any = trainer.strategy.model  # by DDP, which knows the processes
        self._curvature = _TracelessCurvature(
            wrapped,
            self._loss_fn or self._loss_of_training_step(pl_module),
            _find_optimizer(trainer, self._place),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **self._settings,
        )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure, if Lightning optimizes."""
        if not pl_module.automatic_optimization:
            return
        self._batch_idx = batch_idx
        try:
            self.measure(batch)
        except _NoLossError:
            if trainer.world_size > 1:  # others have a loss, and would wait for this process
                raise

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go of the module."""
        self._curvature = None

    def _loss_of_training_step(self, module: pl.LightningModule) -> Callable[[pl.LightningModule, Any], Tensor]:
        if not module.automatic_optimization:
            raise ValueError(
                "with manual optimisation training_step takes steps of its own, so the loss must come from elsewhere: "
                "AdaHessianCallback(loss_fn) with loss_fn(module, batch), and callback.measure(batch) in training_step"
            )
        has_parameter = pl.utilities.signature_utils.is_param_in_hook_signature
        if has_parameter(module.training_step, "dataloader_iter", explicit=True):
            raise ValueError(
                "training_step(dataloader_iter) fetches batches itself, so that none can be measured before: let it "
                "take a batch, or optimize manually and call AdaHessianCallback.measure(batch)"
            )
        takes_index = has_parameter(module.training_step, "batch_idx", min_args=2)

        def loss_fn(module: pl.LightningModule, batch: Any) -> Tensor:
            output = module.training_step(batch, self._batch_idx) if takes_index else module.training_step(batch)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                raise _NoLossError(
                    "training_step returned no loss. Lightning skips such a batch, but with several processes it "
                    "cannot: return a loss for every batch"
                )
            return loss

        return loss_fn


class _NoLossError(CurvatureError):
    """A batch that Lightning is going to skip."""


class _TracelessCurvature(Curvature[pl.LightningModule]):
    """The curvature of a loss that logs and counts, computed in the precision of the training step."""

    def _measure(self, part: Any, weight: float) -> None:
        from lightning_utilities.core.apply_func import apply_to_collection  # comes with either Lightning

        trainer = self.model.trainer
        with _silenced(trainer), _attributes_restored(self.model), trainer.precision_plugin.train_step_context():
            # A step may take its batch apart, or scale it in place.
            super()._measure(apply_to_collection(part, Tensor, Tensor.clone, allow_frozen=True), weight)


def _find_optimizer(trainer: pl.Trainer, place: int | None) -> AdaHessian | DenseAndSparse:
    optimizers = trainer.optimizers
    candidates = optimizers if place is None else optimizers[place : place + 1]
    found = [optimizer for optimizer in candidates if isinstance(optimizer, (AdaHessian, DenseAndSparse))]
    if len(found) == 1:
        return found[0]
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    if not found:
        where = "among the optimizers" if place is None else f"at place {place} of the optimizers"
        raise ValueError(
            f"there is no AdaHessian {where} ({names}): return one from configure_optimizers, or leave out "
            "AdaHessianCallback"
        )
    raise ValueError(
        f"there are several AdaHessians among the optimizers ({names}): give each a callback of its own, "
        "AdaHessianCallback(loss_fn, optimizer=0) for the first"
    )


@contextmanager
def _silenced(trainer: pl.Trainer) -> Iterator[None]:
    """Keep loggers from hearing anything, also from those who speak to them directly."""
    loggers = trainer.loggers
    trainer.loggers = [pl.loggers.logger.DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


@contextmanager
def _attributes_restored(module: nn.Module) -> Iterator[None]:
    """Undo what a pass does to attributes: counters, lists of outputs, the states of metrics; and log nothing."""
    before = [(part, dict(vars(part))) for part in module.modules()]
    try:
        for part, attributes in before:
            vars(part).update({name: _spare(value) for name, value in attributes.items() if name not in _OF_TORCH})
            if isinstance(part, pl.LightningModule):
                vars(part)["log"] = _log_nothing  # log_dict calls it too
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


def _spare(value: Any) -> Any:
    """A copy of what may be written into. Members that are no collections are shared: lists can be an epoch long."""
    return value.clone() if isinstance(value, Tensor) and not value.requires_grad else _spare_collection(value)


def _spare_collection(value: Any) -> Any:
    spare = copy.copy(value) if isinstance(value, (list, dict, set, deque)) else value
    if isinstance(spare, list):
        spare[:] = map(_spare_collection, spare)
    elif isinstance(spare, dict):
        spare.update({key: _spare_collection(member) for key, member in spare.items()})
    return spare


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass
