"""TRL: log-probabilities of the fused head, in operations that can be differentiated twice.

``adahessian.integrations.transformers`` uses this file for measurements. To save memory, TRL's own function computes
the logits in chunks and in place. Its gradient cannot be differentiated.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.functional import linear


@contextmanager
def differentiable_head() -> Iterator[None]:
    """Replace TRL's fused head, if TRL is loaded and has one."""
    fused: Any = getattr(sys.modules.get("trl.kernels"), "ChunkedLogProbFunction", None)
    if fused is None:
        yield
        return
    fused.apply = _log_probs  # hides the classmethod of torch.autograd.Function
    try:
        yield
    finally:
        del fused.apply


def _log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: Any = (),
) -> tuple[Tensor, ...]:
    """Return log-probabilities of the targets and the values that TRL logs, with the arguments of TRL's function."""
    bias = bias if bias is None else bias.to(hidden.dtype)
    logits = linear(hidden, weight.to(hidden.dtype), bias).float() * logit_scale
    if final_logit_softcapping is not None:
        logits = final_logit_softcapping * (logits / final_logit_softcapping).tanh()
    logits = logits / temperature
    every = logits.log_softmax(-1)
    chosen = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = -(every.exp() * every).sum(-1)
    return chosen, entropy, (2 * every).logsumexp(-1), logits.mean(-1), every.argmax(-1) == targets
