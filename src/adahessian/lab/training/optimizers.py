"""Optimizers, from their configs. Muon trains all parameters of a model, whereas PyTorch's trains only matrices."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, muon
from torch.optim.adam import adam

import adahessian
from adahessian.lab.configs import optimizers as configs
from adahessian.lab.errors import ConfigError

# What the training step does, or the parameter groups. The optimizer gets all other options.
_NOT_OF_OPTIMIZER = {"clip_norm", "decay_bias_and_norm", "batch_fraction", "product_dtype"}
# Names of options in pytorch_optimizer.
_PEER_OPTIONS = {"precondition_every": "precondition_frequency", "rho": "p", "curvature_every": "update_period"}
_NEWTON_SCHULZ = {"ns_coefficients": (DEFAULT_A, DEFAULT_B, DEFAULT_C), "ns_steps": DEFAULT_NS_STEPS, "eps": EPS}
_MUON: dict[str, Any] = {**_NEWTON_SCHULZ, "nesterov": True, "adjust_lr_fn": "match_rms_adamw", "has_complex": False}
_ADAMW: dict[str, Any] = {"decoupled_weight_decay": True, "amsgrad": False, "maximize": False, "eps": 1e-8}


def build_optimizer(
    config: configs.OptimizerConfig, model: nn.Module, *, seed: int, embedding_lr: float = 0.01
) -> Optimizer:
    """Return a new optimizer. ``seed`` decides AdaHessian's probes, and ``embedding_lr`` is for sparse embeddings."""
    build: Callable[..., Optimizer]
    is_sparse = has_sparse_embeddings(model)
    options = {name: value for name, value in vars(config).items() if name not in _NOT_OF_OPTIMIZER}
    if isinstance(config, (configs.AdaHessian, configs.AdaHessianKron)):
        sparse_lr = embedding_lr if is_sparse else None
        groups = adahessian.param_groups(model, decay_bias_and_norm=config.decay_bias_and_norm, sparse_lr=sparse_lr)
        build = getattr(adahessian, type(config).__name__)  # configs have the names of the optimizers
        return build(groups, seed=seed, **options)
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
    if isinstance(config, (configs.SOAP, configs.Sophia)):
        import pytorch_optimizer as peers  # an extra

        build = peers.SOAP if isinstance(config, configs.SOAP) else peers.SophiaH
        options = {_PEER_OPTIONS.get(name, name): value for name, value in options.items()}
    else:
        build = getattr(torch.optim, type(config).__name__)
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
    """Return the parameters of embeddings and of the output layer, which Muon is not designed for.

    The output layer is an adaptive softmax or the last linear layer, unless that is a part of a repeated layer.
    """
    outer = (nn.Embedding, nn.EmbeddingBag, nn.AdaptiveLogSoftmaxWithLoss)
    modules: list[nn.Module] = [module for module in model.modules() if isinstance(module, outer)]
    repeated = {inner for each in model.modules() if isinstance(each, nn.ModuleList) for inner in each.modules()}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    modules += [module for module in linears[-1:] if module not in repeated]
    return {param for module in modules for param in module.parameters()}


def set_precision(precision: str) -> None:
    """Set whether a GPU rounds the operands of float32 products to tf32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"


class Muon(Optimizer):
    """Update groups with ``is_matrix`` as torch.optim.Muon does, at AdamW's learning rate, and others as AdamW does.

    Kernels are matrices of (out, in x kernel). Groups take ``lr``, ``momentum``, ``betas`` and ``weight_decay``.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            names = ("momentum_buffer",) if group["is_matrix"] else ("exp_avg", "exp_avg_sq")
            for param in params:
                if not self.state[param]:
                    averages = {name: torch.zeros_like(param) for name in names}
                    self.state[param] = averages if group["is_matrix"] else {"step": torch.zeros(()), **averages}
            update = self._update_matrices if group["is_matrix"] else self._update_others
            update(params, [param.grad for param in params], group)

    def _update_matrices(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        views = []
        for param, grad in zip(params, grads, strict=True):
            # Kernels may be stored channels-last. A matrix must be a view, and the order of its columns is free.
            strides = param.stride()
            order = sorted(range(1, len(strides)), key=lambda dim: -strides[dim])
            tensors = (param, grad, self.state[param]["momentum_buffer"])
            views.append([each.permute(0, *order).flatten(1) for each in tensors])
        options = {name: group[name] for name in ("lr", "weight_decay", "momentum")}
        matrices, gradients, momenta = map(list, zip(*views, strict=True))
        muon(matrices, gradients, momenta, **options, **_MUON)

    def _update_others(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        averages, squares, steps = (
            [self.state[param][name] for param in params] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        (beta1, beta2), options = group["betas"], {name: group[name] for name in ("lr", "weight_decay")}
        adam(params, grads, averages, squares, [], steps, beta1=beta1, beta2=beta2, **options, **_ADAMW)
