"""Optimizers, from their configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

import adahessian
from adahessian.lab.configs import optimizers as configs
from adahessian.lab.errors import ConfigError
from adahessian.lab.training.muon import Muon

# Adagrad's learning rate for sparse embeddings that AdaHessian does not train, where the task has no option for it.
_EMBEDDING_LR = 0.01
# What the training step does, or the parameter groups. The optimizer gets all other options.
_NOT_OF_OPTIMIZER = {"clip_norm", "decay_bias_and_norm", "batch_fraction", "product_dtype"}
# Names of options in pytorch_optimizer.
_PEER_OPTIONS = {"precondition_every": "precondition_frequency", "rho": "p", "curvature_every": "update_period"}


def build_optimizer(
    config: configs.OptimizerConfig, model: nn.Module, *, seed: int, embedding_lr: float | None = None
) -> Optimizer:
    """Return a new optimizer for a model. AdaHessian's probes depend on the seed.

    Beside AdaHessian, Adagrad trains sparse embeddings, at ``embedding_lr``.
    """
    is_sparse = has_sparse_embeddings(model)
    options = {name: value for name, value in vars(config).items() if name not in _NOT_OF_OPTIMIZER}
    if isinstance(config, (configs.AdaHessian, configs.AdaHessianKron)):
        sparse_lr = (embedding_lr or _EMBEDDING_LR) if is_sparse else None
        groups = adahessian.param_groups(model, decay_bias_and_norm=config.decay_bias_and_norm, sparse_lr=sparse_lr)
        optimizer = adahessian.AdaHessian if isinstance(config, configs.AdaHessian) else adahessian.AdaHessianKron
        return optimizer(groups, seed=seed, **options)
    is_plain_sgd = isinstance(config, configs.SGD) and not config.momentum and not config.weight_decay
    if is_sparse and not is_plain_sgd and not isinstance(config, configs.Adagrad):
        raise ConfigError(
            f"{config.title} cannot train embeddings with sparse gradients. Choose adahessian-kron, adahessian, "
            "adagrad, or sgd without --momentum and --weight-decay."
        )
    if isinstance(config, configs.LBFGS):
        if config.clip_norm is not None:
            raise ConfigError(f"--clip-norm {config.clip_norm} would break the line search of L-BFGS. Leave it out.")
        return LBFGS(model.parameters(), config.lr, history_size=config.history, line_search_fn="strong_wolfe")
    if isinstance(config, configs.Muon):
        return Muon(_muon_groups(model, config), options)
    build: Callable[..., Optimizer]
    if isinstance(config, (configs.SOAP, configs.Sophia)):
        import pytorch_optimizer as peers  # an extra

        build = peers.SOAP if isinstance(config, configs.SOAP) else peers.SophiaH
        options = {_PEER_OPTIONS.get(name, name): value for name, value in options.items()}
    else:
        build = getattr(torch.optim, type(config).__name__)  # configs have the names of torch's classes
        can_fuse = not isinstance(config, (configs.Adagrad, configs.RMSprop))
        if can_fuse and all(param.is_cuda for param in model.parameters()):
            options["fused"] = True
    return build(_decaying(model, config), **options)


def has_sparse_embeddings(model: nn.Module) -> bool:
    """Return whether some gradients of a model are sparse."""
    return any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse for module in model.modules())


def _decaying(model: nn.Module, config: Any) -> Any:
    """Return the parameters of a model, in groups if biases and norms do not decay."""
    if config.decay_bias_and_norm:
        return model.parameters()
    groups = adahessian.param_groups(model, decay_bias_and_norm=False)
    return [{name: group[name] for name in ("params", "weight_decay") if name in group} for group in groups]


def _muon_groups(model: nn.Module, config: configs.Muon) -> list[dict[str, Any]]:
    spared, groups = _embeddings_and_output(model), []
    for group in adahessian.param_groups(model, decay_bias_and_norm=config.decay_bias_and_norm):
        decay = {"weight_decay": group["weight_decay"]} if "weight_decay" in group else {}
        for is_matrix in (True, False):
            chosen = [param for _, param in group["params"] if (param.dim() >= 2 and param not in spared) == is_matrix]
            groups += [{"params": chosen, "is_matrix": is_matrix, **decay}] if chosen else []
    return groups


def _embeddings_and_output(model: nn.Module) -> set[Tensor]:
    """Return the parameters of embeddings and of the output layer, which Muon is not made for.

    The output layer is an adaptive softmax or the last linear layer, unless that is a part of a repeated layer.
    """
    outer = (nn.Embedding, nn.EmbeddingBag, nn.AdaptiveLogSoftmaxWithLoss)
    modules: list[nn.Module] = [module for module in model.modules() if isinstance(module, outer)]
    repeated = {inner for each in model.modules() if isinstance(each, nn.ModuleList) for inner in each.modules()}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    modules += [module for module in linears[-1:] if module not in repeated]
    return {param for module in modules for param in module.parameters()}


def set_precision(precision: str) -> None:
    """Let a GPU round the operands of float32 products to tf32, or not."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
