"""Optimizers, from their configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import adahessian
from adahessian.lab.configs import optimizers as configs
from adahessian.lab.errors import ConfigError
from adahessian.lab.training.muon import Muon

# Adagrad's learning rate for sparse embeddings beside AdaHessian, where the task has no option for it.
_EMBEDDING_LR = 0.01


def build_optimizer(
    config: configs.OptimizerConfig, model: nn.Module, *, seed: int, embedding_lr: float | None = None
) -> Optimizer:
    """Return a new optimizer for a model.

    Args:
        config: Its options.
        model: The model to train.
        seed: Seed of AdaHessian's probes.
        embedding_lr: Adagrad's learning rate for sparse embeddings, if AdaHessian trains the rest.

    Raises:
        ConfigError: If the optimizer cannot train the model, or its package is missing.
    """
    sparse = has_sparse_embeddings(model)
    if isinstance(config, (configs.AdaHessian, configs.AdaHessianKron)):
        sparse_lr = (embedding_lr or _EMBEDDING_LR) if sparse else None
        return _adahessian(config, model, seed=seed, sparse_lr=sparse_lr)
    is_plain_sgd = isinstance(config, configs.SGD) and not config.momentum and not config.weight_decay
    if sparse and not is_plain_sgd and not isinstance(config, configs.Adagrad):
        raise ConfigError(
            f"{config.title} cannot train embeddings with sparse gradients. Choose adahessian-kron, adahessian, "
            "adagrad, or sgd without --momentum and --weight-decay."
        )
    return _BUILDERS[type(config)](config, model)


def has_sparse_embeddings(model: nn.Module) -> bool:
    """Return whether some gradients of a model are sparse."""
    return any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse for module in model.modules())


def _adahessian(
    config: configs.AdaHessian | configs.AdaHessianKron, model: nn.Module, *, seed: int, sparse_lr: float | None
) -> Optimizer:
    groups = adahessian.param_groups(model, decay_bias_and_norm=config.decay_bias_and_norm, sparse_lr=sparse_lr)
    names = ["lr", "betas", "weight_decay", "block_size", "num_probes", "curvature_every", "curvature_warmup"]
    if isinstance(config, configs.AdaHessianKron):
        return adahessian.AdaHessianKron(groups, seed=seed, **_options(config, *names, "damping"))
    names += ["eps", "hessian_power", "signed", "steady_start"]
    return adahessian.AdaHessian(groups, seed=seed, **_options(config, *names))


def _options(config: configs.OptimizerConfig, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def _decaying(model: nn.Module, config: Any) -> Any:
    """Return the parameters of a model, in groups if biases and norms do not decay."""
    if config.decay_bias_and_norm:
        return model.parameters()
    groups = adahessian.param_groups(model, decay_bias_and_norm=False)
    return [{name: group[name] for name in ("params", "weight_decay") if name in group} for group in groups]


def _torch(
    optimizer: Callable[..., Optimizer], *names: str, can_fuse: bool = True
) -> Callable[[Any, nn.Module], Optimizer]:
    def build(config: Any, model: nn.Module) -> Optimizer:
        fused = {"fused": True} if can_fuse and all(param.is_cuda for param in model.parameters()) else {}
        return optimizer(_decaying(model, config), **_options(config, "lr", "weight_decay", *names), **fused)

    return build


def _muon(config: configs.Muon, model: nn.Module) -> Optimizer:
    spared = _embeddings_and_output(model)
    groups = []
    for group in adahessian.param_groups(model, decay_bias_and_norm=config.decay_bias_and_norm):
        params = [param for _, param in group["params"]]
        for is_matrix in (True, False):
            chosen = [param for param in params if (param.dim() >= 2 and param not in spared) == is_matrix]
            decay = {"weight_decay": group["weight_decay"]} if "weight_decay" in group else {}
            groups += [{"params": chosen, "is_matrix": is_matrix, **decay}] if chosen else []
    return Muon(groups, **_options(config, "lr", "momentum", "betas", "weight_decay"))


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


def _soap(config: configs.SOAP, model: nn.Module) -> Optimizer:
    every = {"precondition_frequency": config.precondition_every}
    optimizer: Optimizer = _peers().SOAP(
        _decaying(model, config), **_options(config, "lr", "betas", "weight_decay"), **every
    )
    return optimizer


def _sophia(config: configs.Sophia, model: nn.Module) -> Optimizer:
    own = {"p": config.rho, "update_period": config.curvature_every}
    optimizer: Optimizer = _peers().SophiaH(
        _decaying(model, config), **_options(config, "lr", "betas", "weight_decay"), **own
    )
    return optimizer


def _peers() -> Any:
    try:
        import pytorch_optimizer
    except ImportError as error:
        raise ConfigError('SOAP and Sophia need pytorch_optimizer. Run: pip install "adahessian[peers]"') from error
    return pytorch_optimizer


def _lbfgs(config: configs.LBFGS, model: nn.Module) -> Optimizer:
    if config.clip_norm is not None:
        raise ConfigError(f"--clip-norm {config.clip_norm} would break the line search of L-BFGS. Leave it out.")
    return LBFGS(model.parameters(), config.lr, history_size=config.history, line_search_fn="strong_wolfe")


_BUILDERS: dict[type[configs.OptimizerConfig], Callable[[Any, nn.Module], Optimizer]] = {
    configs.SGD: _torch(SGD, "momentum"),
    configs.Adam: _torch(Adam, "betas", "eps"),
    configs.AdamW: _torch(AdamW, "betas", "eps"),
    configs.Adagrad: _torch(Adagrad, "eps", can_fuse=False),
    configs.RMSprop: _torch(RMSprop, "alpha", "eps", "momentum", can_fuse=False),
    configs.Muon: _muon,
    configs.SOAP: _soap,
    configs.Sophia: _sophia,
    configs.LBFGS: _lbfgs,
}


def set_precision(precision: str) -> None:
    """Let a GPU round the operands of float32 products to tf32, or not."""
    torch.backends.cuda.matmul.allow_tf32 = precision != "float32"
    torch.backends.cudnn.allow_tf32 = precision != "float32"
