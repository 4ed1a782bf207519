"""Code in full precision, whatever the user has enabled around it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Disables autocast on all devices. The gradient and the optimizer may run under an autocast that the forward pass did
# not run under.
autocast_disabled = torch._C._DisableAutocast


@contextmanager
def accurate_matmul(tensor: Tensor) -> Iterator[None]:
    """Multiply float32 matrices on a tensor's device without TF32 or bfloat16."""
    matmul = (torch.backends.cuda if tensor.is_cuda else torch.backends.mkldnn).matmul
    # This API reads and restores what the older one, allow_tf32, has set. The older one cannot read this one.
    before = matmul.fp32_precision
    if before in ("none", "ieee"):
        yield
        return
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = "none"
        if matmul.fp32_precision != before:  # else it was inherited from torch.backends
            matmul.fp32_precision = before
