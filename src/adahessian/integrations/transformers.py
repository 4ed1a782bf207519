"""transformers: a ``Trainer`` that measures the curvature before it computes the gradient."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from adahessian.base.batches import tensors_in
from adahessian.curvature import Curvature
from adahessian.groups import param_groups
from adahessian.kron import AdaHessianKron
from adahessian.optimizer import AdaHessian

try:
    from transformers import Trainer, TrainingArguments
except ImportError as missing:
    message = 'transformers is not installed. Run: pip install "adahessian[transformers]".'
    raise ImportError(message, name="transformers") from missing

from adahessian.integrations.accelerate import prepare_curvature


class _MicroBatch(NamedTuple):
    """The inputs of a loss. Slicing a micro-batch slices only its tensors."""

    inputs: Mapping[str, Any]
    num_items: Any  # for example tokens, in all micro-batches of the step on all processes
    examples: int  # in this micro-batch, before slicing


class AdaHessianMixin(Trainer):
    """Mixin that makes a subclass of ``transformers.Trainer`` train with AdaHessianKron or AdaHessian.

    Put it first, as in ``class MyTrainer(AdaHessianMixin, Seq2SeqTrainer)``. It adds three arguments to the Trainer's.

    Args:
        optimizer_class: :class:`adahessian.AdaHessianKron` or :class:`adahessian.AdaHessian`.
        optimizer_options: Arguments of ``optimizer_class``. ``lr`` and ``weight_decay`` default to those in
            ``TrainingArguments``. Biases and norms have no weight decay. To create the optimizer yourself, pass
            ``optimizers=(optimizer, scheduler)`` instead.
        curvature_options: Arguments of :class:`adahessian.Curvature`, such as ``batch_fraction``.

    Raises:
        ValueError: If both ``optimizer_options`` and ``optimizers`` are passed, or the Trainer would split batches over
            several GPUs with ``torch.nn.DataParallel``.
    """

    optimizer: Any
    curvature: Curvature[nn.Module] | None = None
    _curvature_of: tuple[nn.Module, Optimizer] | None = None

    def __init__(
        self,
        *args: Any,
        optimizer_class: type[AdaHessian] = AdaHessianKron,
        optimizer_options: Mapping[str, Any] | None = None,
        curvature_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError(
                "args.n_gpu is above 1, so the Trainer would use torch.nn.DataParallel, which is not supported. Launch "
                "one process per GPU with torchrun, or select one GPU with CUDA_VISIBLE_DEVICES=0."
            )
        if optimizer_options and self.optimizer is not None:
            raise ValueError("optimizer_options do not apply to the optimizer in optimizers. Pass only one of them.")
        self._optimizer_class, self._optimizer_options = optimizer_class, dict(optimizer_options or {})
        self._curvature_options = dict(curvature_options or {})

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create the optimizer if there is none yet."""
        if self.optimizer is None:
            options = {"lr": self.args.learning_rate, "weight_decay": self.args.weight_decay, **self._optimizer_options}
            is_for_adamw = options["lr"] == TrainingArguments.learning_rate
            if is_for_adamw and not issubclass(self._optimizer_class, AdaHessianKron):
                warnings.warn(
                    f"learning_rate={options['lr']} is the default of TrainingArguments, chosen for AdamW. Set a much "
                    "larger one, such as AdaHessian's default of 0.15.",
                    stacklevel=2,
                )
            self.optimizer = self._optimizer_class(self._groups(self.model if model is None else model), **options)
        return super().create_optimizer()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Measure the curvature if it is due, then compute the gradient."""
        model.train()  # an evaluation leaves the model in eval mode
        inputs = self._prepare_inputs(inputs)
        # Each call of train may wrap the model again, and each trial of a search creates a model and an optimizer.
        if self.curvature is None or self._curvature_of != (model, self.optimizer):
            prepared = self.accelerator, model, self._objective, self.optimizer
            self.curvature = prepare_curvature(*prepared, **self._curvature_options)
            self._curvature_of = (model, self.optimizer)
        self.curvature.measure(_MicroBatch(inputs, num_items_in_batch, self._count_examples(inputs)))
        return super().training_step(model, inputs, num_items_in_batch)

    def _objective(self, model: nn.Module, batch: _MicroBatch) -> Tensor:
        inputs, num_items, examples = batch
        # The Trainer's own rule for whether a loss is part of a sum over micro-batches, or a mean that it divides.
        is_part = getattr(self, "loss_is_scaled_for_ga", None)
        if is_part is None:
            is_part = self.compute_loss_func is not None or (self.model_accepts_loss_kwargs and num_items is not None)
        if num_items is not None:
            num_items = num_items * (self._count_examples(inputs) / examples)
        # compute_loss removes the labels from the dict, so it gets a copy.
        loss = cast(Tensor, self.compute_loss(model, dict(inputs), num_items_in_batch=num_items))
        return loss * self.current_gradient_accumulation_steps if is_part else loss

    def _count_examples(self, inputs: Mapping[str, Any]) -> int:
        dim = self._curvature_options.get("batch_dim", 0)
        return next((tensor.shape[dim] for tensor in tensors_in(inputs) if tensor.dim() > dim), 1)

    def _groups(self, model: Any) -> list[dict[str, Any]]:
        """Group parameters by module, with the weight decay that the Trainer gives each parameter."""
        decaying = set(self.get_decay_parameter_names(model))
        groups = []
        for group in param_groups(model):
            trained = [(name, param) for name, param in group["params"] if param.requires_grad]
            for options in ({}, {"weight_decay": 0.0}):
                params = [each for each in trained if (each[0] in decaying) != bool(options)]
                groups += [{**group, **options, "params": params}] if params else []
        return groups


class AdaHessianTrainer(AdaHessianMixin):
    """``transformers.Trainer`` with AdaHessianKron. :class:`AdaHessianMixin` describes the arguments.

    Example:
        >>> arguments = TrainingArguments("checkpoints", learning_rate=5e-5, weight_decay=0.01)
        >>> trainer = AdaHessianTrainer(model, arguments)  # doctest: +SKIP
    """
