import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def started():
    """Ranks that are running, by their number."""
    running = {}
    yield running
    for ranks in running.values():
        ranks.stop()


@pytest.fixture(params=[2, 4], ids="{} ranks".format)
def ranks(request, started):
    """Processes to run a function on."""
    if request.param not in started or not all(process.is_alive() for process in started[request.param].processes):
        started[request.param] = Ranks(request.param)
    return started[request.param]


@pytest.fixture
def two_ranks(started):
    if 2 not in started or not all(process.is_alive() for process in started[2].processes):
        started[2] = Ranks(2)
    return started[2]


def pytest_collection_modifyitems(items):
    """Let one process of a parallel run have all tests that start processes themselves."""
    for item in items:
        if "distributed" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("ranks"))
