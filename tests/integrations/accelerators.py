"""Accelerators of different kinds in one process: accelerate keeps their state in classes."""

import pytest
from accelerate.state import AcceleratorState, GradientState


def reset_accelerators():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_state():
    """Let each test create accelerators of its own kind."""
    reset_accelerators()
    yield
    reset_accelerators()
