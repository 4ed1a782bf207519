import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _on_one_core():
    """Sums have the same order in each run, and tests that run in parallel do not compete for cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Caches of one test session, instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
