"""Kernels that have second derivatives, in place of those that have none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from adahessian.curvature.sync_batch_norm import communicates, differentiable_sync_batch_norm


@contextmanager
def twice_differentiable(model: nn.Module, *, compiled: bool = False) -> Iterator[None]:
    """Run a model on kernels that torch can differentiate twice; only inside, the gradient keeps its own.

    Attention takes the math kernel instead of a fused one, recurrent layers do without cuDNN and oneDNN,
    ``SyncBatchNorm`` computes by ordinary operations, and what has been compiled by ``torch.compile`` runs as it was
    written, unless the pass itself is compiled.
    """
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(_without("cudnn"))
            stack.enter_context(_without("mkldnn"))
        if communicates(model):
            stack.enter_context(differentiable_sync_batch_norm())
        # Whoever has compiled something has loaded the compiler; loading it for this alone would take seconds.
        if not compiled and "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _without(library: Literal["cudnn", "mkldnn"]) -> Iterator[None]:
    # The flags of torch.backends set other flags too, and fail where precisions were set by torch's newer settings.
    enabled = getattr(torch._C, f"_get_{library}_enabled")()
    set_enabled = getattr(torch._C, f"_set_{library}_enabled")
    set_enabled(False)
    try:
        yield
    finally:
        set_enabled(enabled)
