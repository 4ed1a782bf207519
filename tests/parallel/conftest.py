import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def running():
    """Processes that have been started, by their number."""
    running = {}
    yield running
    for ranks in running.values():
        ranks.stop()


def _start(running, size):
    if size not in running or not all(process.is_alive() for process in running[size].processes):
        running[size] = Ranks(size)
    return running[size]


@pytest.fixture(params=[2, 4], ids="{} ranks".format)
def ranks(request, running):
    """Processes to run a function on."""
    return _start(running, request.param)


@pytest.fixture
def two_ranks(running):
    return _start(running, 2)


@pytest.fixture
def four_ranks(running):
    return _start(running, 4)


def pytest_collection_modifyitems(items):
    """Let one process of a parallel run have all tests that start processes."""
    for item in items:
        if "parallel" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("ranks"))
