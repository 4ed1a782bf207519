"""transformers: a ``Trainer`` that measures the curvature before it takes the gradient.

The objective of a step is what the Trainer differentiates, added up over micro-batches. The curvature is that of the
same objective, whoever normalises it: the model or ``compute_loss_func``, by the number of items in all micro-batches
(and processes), or the Trainer, by the number of micro-batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from adahessian.curvature.batches import tensors_of
from adahessian.curvature.measurement import Curvature
from adahessian.groups import param_groups
from adahessian.optimizer import AdaHessian

try:
    from transformers import Trainer, TrainingArguments
except ImportError as missing:
    raise ImportError(
        'this needs transformers: pip install "adahessian[transformers]"', name="transformers"
    ) from missing

from adahessian.integrations.accelerate import prepare_curvature

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class _MicroBatch(NamedTuple):
    """What a loss is computed from; a slice of it cuts the inputs alone."""

    inputs: Mapping[str, Any]
    # Items, such as tokens, that the objective is a mean over, in all micro-batches of the step.
    num_items: Any
    # Examples of this micro-batch before it was cut.
    examples: int
    # What makes the mean over micro-batches their sum, if that is the objective.
    multiple: int


class AdaHessianMixin(_Base):
    """Makes a subclass of ``transformers.Trainer`` train with AdaHessian.

    Name it first: ``class MyTrainer(AdaHessianMixin, Seq2SeqTrainer)``. It takes all arguments of the Trainer, and:

    Args:
        adahessian_settings: Arguments of :class:`adahessian.AdaHessian`. The learning rate and the weight decay are
            those of ``TrainingArguments`` unless they are here; biases and norms do not decay, as ever with a Trainer.
            For an optimizer of your own pass ``optimizers=(optimizer, scheduler)`` instead.
        curvature_settings: Arguments of :class:`adahessian.Curvature`, such as ``batch_fraction``. With accumulated
            gradients all micro-batches are measured; ``{"accumulate": False}`` measures the first alone.

    Raises:
        ValueError: If there are settings for an optimizer that is not made here, or ``torch.nn.DataParallel`` would
            split the batch.
    """

    # Made before the first step: the optimizer, which accelerate then wraps, and the curvature of what it has wrapped.
    optimizer: Any
    curvature: Curvature[nn.Module] | None = None
    _curvature_of: tuple[nn.Module, Optimizer] | None = None

    def __init__(
        self,
        *args: Any,
        adahessian_settings: Mapping[str, Any] | None = None,
        curvature_settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError(
                "the Trainer would split each batch over several GPUs by torch.nn.DataParallel. Launch one process for "
                "each, with torchrun, or name one with CUDA_VISIBLE_DEVICES=0"
            )
        if adahessian_settings and self.optimizer is not None:
            raise ValueError("adahessian_settings are for an optimizer that is made here: put them into your own")
        self._adahessian_settings = dict(adahessian_settings or {})
        self._curvature_settings = dict(curvature_settings or {})

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """An AdaHessian, unless there is an optimizer already."""
        if self.optimizer is None:
            settings: dict[str, Any] = {"lr": self.args.learning_rate, "weight_decay": self.args.weight_decay}
            settings |= self._adahessian_settings
            if settings["lr"] == TrainingArguments.learning_rate:
                warnings.warn(
                    f"learning_rate={settings['lr']} is what TrainingArguments have by default, for AdamW. AdaHessian "
                    "divides by curvatures and wants far more: its own default is 0.15",
                    stacklevel=2,
                )
            trained: Any = self.model if model is None else model
            self.optimizer = AdaHessian(self._groups(trained), **settings)
        optimizer: Optimizer = super().create_optimizer()
        return optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Measure the curvature, if it is due, then take the gradient."""
        # Both as the gradient will find them: evaluation leaves the model in its own mode.
        model.train()
        inputs = self._prepare_inputs(inputs)
        examples, multiple = self._count_examples(inputs), self._multiple(num_items_in_batch)
        self._curvature_for(model).measure(_MicroBatch(inputs, num_items_in_batch, examples, multiple))
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def _curvature_for(self, model: nn.Module) -> Curvature[nn.Module]:
        # Each call of train may wrap the model anew, and each trial of a search makes both anew.
        if self.curvature is None or self._curvature_of != (model, self.optimizer):
            settings = {"accumulate": self.args.gradient_accumulation_steps > 1} | self._curvature_settings
            self.curvature = prepare_curvature(self.accelerator, model, self._objective, self.optimizer, **settings)
            self._curvature_of = (model, self.optimizer)
        return self.curvature

    def _objective(self, model: nn.Module, batch: _MicroBatch) -> Tensor:
        inputs, num_items, examples, multiple = batch
        if num_items is not None:
            num_items = num_items * (self._count_examples(inputs) / examples)
        # A copy, as labels are taken out of it.
        loss: Any = self.compute_loss(model, dict(inputs), num_items_in_batch=num_items)
        objective: Tensor = loss * multiple
        return objective

    def _count_examples(self, inputs: Mapping[str, Any]) -> int:
        dim = self._curvature_settings.get("batch_dim", 0)
        return next((tensor.shape[dim] for tensor in tensors_of(inputs) if tensor.dim() > dim), 1)

    def _multiple(self, num_items: object) -> int:
        """How many times the mean over micro-batches is what the Trainer, by its own rule, differentiates."""
        is_part_of_sum = getattr(self, "loss_is_scaled_for_ga", None)
        if is_part_of_sum is None:
            by_model = self.model_accepts_loss_kwargs and num_items is not None
            is_part_of_sum = by_model or self.compute_loss_func is not None
        return self.current_gradient_accumulation_steps if is_part_of_sum else 1

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups by kind of module, with the weight decay that the Trainer gives each parameter."""
        decaying = set(self.get_decay_parameter_names(model))
        groups = []
        for group in param_groups(model):
            trained = [(name, param) for name, param in group["params"] if param.requires_grad]
            decayed = [each for each in trained if each[0] in decaying]
            exempt = [each for each in trained if each[0] not in decaying]
            groups += [{**group, "params": decayed}] if decayed else []
            groups += [{**group, "params": exempt, "weight_decay": 0.0}] if exempt else []
        return groups


class AdaHessianTrainer(AdaHessianMixin, Trainer):
    """``transformers.Trainer`` with AdaHessian: see :class:`AdaHessianMixin` for what it takes besides.

    Example:
        >>> from tempfile import mkdtemp
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> trainer = AdaHessianTrainer(
        ...     LlamaForCausalLM(config),
        ...     TrainingArguments(mkdtemp(), learning_rate=0.15, weight_decay=0.01),
        ...     adahessian_settings={"block_size": 32, "update_every": 10},
        ...     curvature_settings={"batch_fraction": 0.25},
        ... )
        >>> trainer.train()  # doctest: +SKIP
    """
