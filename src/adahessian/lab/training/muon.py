"""Muon for matrices and AdamW for all other parameters, in one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, muon
from torch.optim.adam import adam

_NEWTON_SCHULZ = {"ns_coefficients": (DEFAULT_A, DEFAULT_B, DEFAULT_C), "ns_steps": DEFAULT_NS_STEPS, "eps": EPS}
_MUON: dict[str, Any] = {**_NEWTON_SCHULZ, "nesterov": True, "adjust_lr_fn": "match_rms_adamw", "has_complex": False}
_ADAMW: dict[str, Any] = {"decoupled_weight_decay": True, "amsgrad": False, "maximize": False, "eps": 1e-8}


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
