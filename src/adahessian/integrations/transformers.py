"""transformers: an optimizer for every ``Trainer``, with measurements before the gradient.

When training starts, the Trainer calls ``_create``. This function creates the optimizer, finds the Trainer, and makes
the Trainer's ``compute_loss`` measure the curvature first.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from adahessian.base.batches import tensors_in
from adahessian.curvature import Curvature
from adahessian.groups import param_groups
from adahessian.hessian.double_backward import Derivatives, Request
from adahessian.integrations.side_effects import attributes_restored
from adahessian.integrations.trl import differentiable_head
from adahessian.kron import AdaHessianKron
from adahessian.optimizer import AdaHessian

try:
    import transformers
    from transformers import Trainer, TrainingArguments
except ImportError as missing:
    message = 'transformers is not installed. Run: pip install "adahessian[transformers]".'
    raise ImportError(message, name="transformers") from missing

from adahessian.integrations.accelerate import prepare_curvature


def optimizer(
    optimizer_class: type[AdaHessian] = AdaHessianKron,
    *,
    curvature_options: Mapping[str, Any] | None = None,
    **optimizer_options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Return the argument ``optimizer_cls_and_kwargs`` of a ``transformers.Trainer``.

    Each measurement computes the Trainer's loss once more. The Trainer's counters, metrics and lists keep their values.
    Biases and norms have no weight decay.

    Args:
        optimizer_class: :class:`adahessian.AdaHessianKron` or :class:`adahessian.AdaHessian`.
        curvature_options: Arguments of :class:`adahessian.Curvature`, such as ``batch_fraction``.
        optimizer_options: Arguments of ``optimizer_class``. ``lr`` and ``weight_decay`` default to the values in
            ``TrainingArguments``.

    Raises:
        RuntimeError: When training starts, if transformers is older than 5.2.
        ValueError: When training starts, if the Trainer would use ``torch.nn.DataParallel``, or ``batch_fraction`` is a
            function.

    Example:
        >>> trainer = Trainer(model, args, optimizer_cls_and_kwargs=optimizer(lr=1e-3))  # doctest: +SKIP
    """
    options = {"optimizer_class": optimizer_class, "curvature_options": curvature_options or {}}
    return _factory, {**options, **optimizer_options}


def _factory(*groups: Any, **options: Any) -> Callable[..., AdaHessian]:
    """Return the function that creates the optimizer. Old versions of transformers pass parameter groups instead."""
    if groups:
        raise RuntimeError(
            f"optimizer_cls_and_kwargs does not accept functions in transformers {transformers.__version__}. Run: "
            'pip install "transformers>=5.2".'
        )
    return _create


def _create(
    model: nn.Module, optimizer_class: type[AdaHessian], curvature_options: Mapping[str, Any], **options: Any
) -> AdaHessian:
    trainer = _calling_trainer()
    if trainer.args.n_gpu > 1:
        raise ValueError(
            "args.n_gpu is above 1, so the Trainer would use torch.nn.DataParallel, which is not supported. Launch "
            "one process per GPU with torchrun, or select one GPU with CUDA_VISIBLE_DEVICES=0."
        )
    if callable(curvature_options.get("batch_fraction")):
        raise ValueError(
            "curvature_options has a function as batch_fraction, but a Trainer divides losses by num_items_in_batch of "
            "the whole batch. Pass a number, such as 1.0 for batches that must not be cut."
        )
    options = {"lr": trainer.args.learning_rate, "weight_decay": trainer.args.weight_decay, **options}
    if options["lr"] == TrainingArguments.learning_rate and not issubclass(optimizer_class, AdaHessianKron):
        warnings.warn(
            f"learning_rate={options['lr']} is the default of TrainingArguments, chosen for AdamW. Set a much larger "
            "one, such as AdaHessian's default of 0.15.",
            stacklevel=2,
        )
    created = optimizer_class(_groups(trainer, model), **options)
    # A search for hyperparameters creates one optimizer per trial.
    compute_loss = getattr(trainer.compute_loss, "compute_loss", trainer.compute_loss)
    trainer.compute_loss = _MeasuredLoss(trainer, created, compute_loss, curvature_options)
    return created


def _calling_trainer() -> Any:
    """Find the Trainer on the call stack, because a Trainer passes only its model."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(caller := frame.f_locals.get("self"), Trainer):
            return caller
        frame = frame.f_back
    raise RuntimeError("optimizer_cls_and_kwargs was not called by a Trainer. Pass it to a transformers.Trainer.")


def _groups(trainer: Any, model: Any) -> list[dict[str, Any]]:
    """Group parameters by module, with the weight decay that the Trainer gives each parameter."""
    decaying = set(trainer.get_decay_parameter_names(model))
    groups = []
    for group in param_groups(model):
        trained = [(name, param) for name, param in group["params"] if param.requires_grad]
        for options in ({}, {"weight_decay": 0.0}):
            params = [each for each in trained if (each[0] in decaying) != bool(options)]
            groups += [{**group, **options, "params": params}] if params else []
    return groups


class _MicroBatch(NamedTuple):
    """The inputs of a loss. Slicing a micro-batch slices only its tensors."""

    inputs: Mapping[str, Any]
    num_items: Any  # for example tokens, in all micro-batches of the step on all processes
    examples: int  # in this micro-batch, before slicing


class _MeasuredLoss:
    """``compute_loss`` of a Trainer, preceded by a measurement if one is due."""

    def __init__(
        self, trainer: Any, created: AdaHessian, compute_loss: Callable[..., Any], curvature_options: Mapping[str, Any]
    ) -> None:
        self.trainer, self.created = trainer, created
        self.compute_loss, self.options = compute_loss, curvature_options
        self.curvature: Curvature[nn.Module] | None = None

    def __call__(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        used = self.trainer.optimizer
        if model.training and getattr(used, "optimizer", used) is self.created:  # not in an evaluation
            self.curvature = self.curvature or self._create_curvature(model)
            self.curvature.measure(_MicroBatch(inputs, kwargs.get("num_items_in_batch"), self._count_examples(inputs)))
        return self.compute_loss(model, inputs, *args, **kwargs)

    def _create_curvature(self, model: nn.Module) -> Curvature[nn.Module]:
        prepared = self.trainer.accelerator, model, self._objective, self.trainer.optimizer
        curvature = prepare_curvature(*prepared, **self.options)
        measure = curvature.engine.measure

        def measure_without_traces(batch: _MicroBatch, request: Request) -> Derivatives:
            with attributes_restored(self.trainer, shared=("train_dataset", "eval_dataset")), differentiable_head():
                return measure(batch, request)

        curvature.engine.measure = measure_without_traces  # type: ignore[method-assign]
        return curvature

    def _objective(self, model: nn.Module, batch: _MicroBatch) -> Tensor:
        trainer, (inputs, num_items, examples) = self.trainer, batch
        # The Trainer's own rule for whether a loss is part of a sum over micro-batches, or a mean that it divides.
        is_part = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_part is None:
            has_items = trainer.model_accepts_loss_kwargs and num_items is not None
            is_part = has_items or trainer.compute_loss_func is not None
        if num_items is not None:
            num_items = num_items * (self._count_examples(inputs) / examples)
        # compute_loss changes the dict, so it receives a copy.
        loss = cast(Tensor, self.compute_loss(model, dict(inputs), num_items_in_batch=num_items))
        return loss * trainer.current_gradient_accumulation_steps if is_part else loss

    def _count_examples(self, inputs: Mapping[str, Any]) -> int:
        dim = self.options.get("batch_dim", 0)
        return next((tensor.shape[dim] for tensor in tensors_in(inputs) if tensor.dim() > dim), 1)
