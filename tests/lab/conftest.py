import pytest

from adahessian.lab.threads import one_thread


@pytest.fixture(autouse=True, scope="session")
def on_one_core():
    with one_thread():
        yield
