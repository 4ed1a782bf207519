import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def started():
    """Ranks that are running, by their number."""
    running = {}
    yield running
    for ranks in running.values():
        ranks.stop()


def _running(started, size):
    if size not in started or not all(process.is_alive() for process in started[size].processes):
        started[size] = Ranks(size)
    return started[size]


@pytest.fixture(params=[2, 4], ids="{} ranks".format)
def ranks(request, started):
    """Processes to run a function on."""
    return _running(started, request.param)


@pytest.fixture
def two_ranks(started):
    return _running(started, 2)


@pytest.fixture
def four_ranks(started):
    return _running(started, 4)


def pytest_collection_modifyitems(items):
    """Let one process of a parallel run have all tests that start processes themselves."""
    for item in items:
        if "distributed" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("ranks"))
