"""From a name and settings to an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import adahessian
from adahessian.lab.settings import OptimizerName, Settings

# Adagrad's learning rate for the embeddings of a task that has no setting for it.
_EMBEDDING_LR = 0.01


class UnsuitableOptimizerError(Exception):
    """An optimizer that cannot train a model."""


def make_optimizer(
    name: OptimizerName, model: nn.Module, settings: Settings, *, seed: int, steps_per_epoch: int
) -> Optimizer:
    """The optimizer of a run.

    Args:
        name: Which one.
        model: What it trains. Adagrad updates embeddings with sparse gradients where AdaHessian trains the rest.
        settings: Its settings.
        seed: Seed of AdaHessian's probes.
        steps_per_epoch: Steps an epoch, which the epochs that measure at every step are counted in.

    Raises:
        UnsuitableOptimizerError: If the model has sparse embeddings, which this optimizer cannot train.
    """
    sparse = has_sparse_embeddings(model)
    if name == "adahessian":
        return _adahessian(model, settings, sparse=sparse, seed=seed, steps_per_epoch=steps_per_epoch)
    plain_sgd = name == "sgd" and not settings.momentum and not settings.weight_decay
    if sparse and name != "adagrad" and not plain_sgd:
        raise UnsuitableOptimizerError(
            f"the embeddings of this model have sparse gradients, which {name} does not take: choose adahessian (with "
            "Adagrad for the embeddings), adagrad, or sgd without momentum and weight decay"
        )
    return _FIRST_ORDER[name](model, settings)


def has_sparse_embeddings(model: nn.Module) -> bool:
    """Whether some gradients of a model are sparse."""
    return any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse for module in model.modules())


def _adahessian(model: nn.Module, settings: Settings, *, sparse: bool, seed: int, steps_per_epoch: int) -> Optimizer:
    groups = adahessian.param_groups(
        model,
        decay_bias_and_norm=settings.decay_bias_and_norm,
        sparse_lr=getattr(settings, "embedding_lr", _EMBEDDING_LR) if sparse else None,
    )
    return adahessian.AdaHessian(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        hessian_power=settings.hessian_power,
        block_size=settings.block_size,
        signed=settings.averaging == "signed",
        num_probes=settings.num_probes,
        curvature_every=settings.update_every,
        curvature_warmup=round(settings.measured_epochs * steps_per_epoch),
        steady_start=settings.steady_start,
        seed=seed,
    )


def curvature_options(settings: Settings, *, compiled: bool) -> dict[str, Any]:
    """The arguments of :class:`adahessian.Curvature` for these settings."""
    return {
        "batch_fraction": settings.batch_fraction,
        "compile": compiled,
        "product_dtype": torch.bfloat16 if settings.tangents == "bfloat16" and compiled else None,
    }


def _decaying(model: nn.Module, settings: Settings) -> Any:
    """The parameters of a model for torch's own optimizers."""
    if settings.decay_bias_and_norm:
        return model.parameters()
    groups = adahessian.param_groups(model, decay_bias_and_norm=False)
    return [{name: value for name, value in group.items() if name != "averaging"} for group in groups]


def _fused(model: nn.Module) -> bool:
    return all(param.is_cuda for param in model.parameters())


_FIRST_ORDER: dict[OptimizerName, Callable[[nn.Module, Settings], Optimizer]] = {
    "sgd": lambda model, s: SGD(
        _decaying(model, s), s.lr, momentum=s.momentum, weight_decay=s.weight_decay, fused=_fused(model) or None
    ),
    "adam": lambda model, s: Adam(
        _decaying(model, s), s.lr, s.betas, s.eps, s.weight_decay, fused=_fused(model) or None
    ),
    "adamw": lambda model, s: AdamW(
        _decaying(model, s), s.lr, s.betas, s.eps, s.weight_decay, fused=_fused(model) or None
    ),
    "adagrad": lambda model, s: Adagrad(_decaying(model, s), s.lr, weight_decay=s.weight_decay, eps=s.eps),
    "rmsprop": lambda model, s: RMSprop(
        _decaying(model, s), s.lr, s.betas[1], s.eps, s.weight_decay, momentum=s.momentum
    ),
}


def set_precision(precision: str) -> None:
    """Whether a GPU's matrix products of float32 are exact or may be rounded to tf32."""
    torch.backends.cuda.matmul.allow_tf32 = precision != "float32"
    torch.backends.cudnn.allow_tf32 = precision != "float32"
