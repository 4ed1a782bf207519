"""Settings that must be made before Triton is imported, and what tests of several files share."""

import os

import pytest
import torch

from adahessian.messages import say_once

if not torch.cuda.is_available():
    # Triton's interpreter runs the fused kernels on a CPU; Triton asks for it when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def said(caplog):
    """What users are told, as if nothing had been said before."""
    say_once.cache_clear()
    return caplog


@pytest.fixture
def quick_compiler(monkeypatch):
    """All of torch.compile but the code that it writes, which takes seconds."""
    torch._dynamo.reset()
    original = torch.compile

    def quick(function, *, options=None, **settings):
        return original(function, backend="aot_eager", **settings)

    monkeypatch.setattr(torch, "compile", quick)
