"""The time that measurements take."""

import pytest
import torch

from adahessian import AdaHessian, Curvature
from adahessian.curvature import stopwatch
from adahessian.curvature.stopwatch import Stopwatch
from cases import MLP


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves when it is told to."""
    now = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    return now


def test_it_adds_up_what_runs_inside(clock):
    watch = Stopwatch()
    for seconds in (1.0, 2.0):
        with watch.running(torch.device("cpu")):
            clock[0] += seconds
        clock[0] += 10.0
    assert watch.seconds == 3.0


def test_what_fails_counts_too(clock):
    watch = Stopwatch()

    def fail():
        with watch.running(torch.device("cpu")):
            clock[0] += 1.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert watch.seconds == 1.0


def test_a_pass_counts_its_measurements_only(clock):
    model = MLP.model()
    optimizer = AdaHessian(model.parameters())

    def loss_fn(model, batch):
        clock[0] += 1.0
        return MLP.loss(model, batch)

    curvature = Curvature(model, loss_fn, optimizer)
    assert curvature.seconds == 0
    for _ in range(3):
        curvature.measure(MLP.batch())  # the first alone is due
    assert curvature.seconds == 1.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_the_time_of_the_device(monkeypatch):
    monkeypatch.setattr(stopwatch, "_MOST_WAITING", 2)
    watch = Stopwatch()
    device = torch.device("cuda")
    for _ in range(5):
        with watch.running(device):
            torch.cuda._sleep(10_000_000)
    assert watch.seconds > 0.01
