"""Kernels that have second derivatives, in place of those that have none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def twice_differentiable(model: nn.Module, *, compiled: bool = False) -> Iterator[None]:
    """Run a model on kernels that torch can differentiate twice; only inside, the gradient keeps its own.

    Attention takes the math kernel instead of a fused one, recurrent layers do without cuDNN and oneDNN, and what has
    been compiled by ``torch.compile`` runs as it was written, unless the pass itself is compiled.
    """
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(_without_onednn())
        # Whoever has compiled something has loaded the compiler; loading it for this alone would take seconds.
        if not compiled and "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    # torch.backends.mkldnn.flags sets other flags too, and warns of them.
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
