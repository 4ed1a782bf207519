import sys

import pytest
from bench_cases import TINY, TINY_SHAPES

from adahessian.lab.bench import update, workloads
from adahessian.lab.threads import one_thread


@pytest.fixture(autouse=True, scope="session")
def on_one_core():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tiny_bench():
    """The benchmark at sizes that take no time, with no packages of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "CPU_WORKLOADS", TINY)
        patch.setattr(workloads, "IMAGE_SIZE", 8)
        patch.setattr(update, "SHAPES", TINY_SHAPES)
        patch.setattr("adahessian.lab.provenance.commit", lambda: "abc")
        patch.setattr(update, "COPIED_BYTES", 2**20)
        for package in ("pytorch_optimizer", "torch_optimizer"):
            patch.setitem(sys.modules, package, None)
        yield
