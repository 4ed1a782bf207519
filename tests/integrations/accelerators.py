"""Accelerators of several kinds in one process: what they know is kept by their class."""

import pytest
from accelerate.state import AcceleratorState, GradientState


def forget_accelerators():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_state():
    """Let each test have accelerators of its own kind."""
    forget_accelerators()
    yield
    forget_accelerators()
