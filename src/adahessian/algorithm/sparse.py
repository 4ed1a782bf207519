"""Adagrad for groups with ``sparse=True``: embedding tables whose gradients are sparse.

PyTorch cannot differentiate a sparse gradient again. The paper also trains the tables of DLRM with Adagrad.
"""

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.sparse import check_sparse_tensor_invariants

from adahessian.algorithm.state import Group, State


def step_sparse(group: Group, state: dict[Tensor, State]) -> None:
    """Take one step of Adagrad on the parameters of a group that have a gradient."""
    params = [param for param in group["params"] if param.grad is not None]
    grads = [param.grad for param in params]
    for param in params:
        if not state[param]:
            state[param] = {"step": torch.zeros(()), "sum": torch.zeros_like(param)}
    # Adagrad creates sparse tensors. PyTorch warns unless it has been told whether to check their invariants.
    with check_sparse_tensor_invariants(check_sparse_tensor_invariants.is_enabled()):
        adagrad(
            params,
            grads,
            [state[param]["sum"] for param in params],
            [state[param]["step"] for param in params],
            has_sparse_grad=any(grad.is_sparse for grad in grads),
            foreach=False,
            has_complex=any(param.is_complex() for param in params),
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            lr_decay=0.0,
            eps=1e-10,  # torch.optim.Adagrad's default
            maximize=group["maximize"],
        )
