"""Optimizers of other packages, as far as these are installed."""

import sys
from types import ModuleType
from typing import ClassVar

import pytest
from bench_cases import CPU, TINY
from torch.optim import SGD

from adahessian.lab.bench import peers
from adahessian.lab.bench.workloads import make_task

pytestmark = pytest.mark.usefixtures("tiny_bench")


class Peer(SGD):
    """Stands for every optimizer of another package, and notes how it is used."""

    made: ClassVar[list["Peer"]] = []

    def __init__(self, params, lr=0.0, **settings):
        super().__init__(params, lr)
        self.settings = settings
        self.saw_graph = []
        self.made.append(self)

    def step(self, closure=None):
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        self.saw_graph.append(any(grad.requires_grad for grad in grads))
        return super().step(closure)


@pytest.fixture
def one_package(monkeypatch):
    package = ModuleType("pytorch_optimizer")
    for name in ("AdaHessian", "SophiaH", "SOAP", "Muon"):
        setattr(package, name, Peer)
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", package)
    monkeypatch.setattr(Peer, "made", [])


def test_peers_that_are_installed_take_part_in_eager_mode(one_package):
    found, missing = peers.installed_peers()
    assert [name for each in found for name in each.schedules] == [
        "pytorch_optimizer.AdaHessian, every step",
        "pytorch_optimizer.AdaHessian, every 10 steps",
        "pytorch_optimizer.SophiaH, every 10 steps",
        "pytorch_optimizer.SOAP, every 10 steps",
        "pytorch_optimizer.Muon",
    ]
    assert missing == ["torch_optimizer.Adahessian, every step"]
    assert all(each.modes == ("eager",) for each in found)


@pytest.mark.parametrize("workload", ["gpt", "lstm"])
def test_peers_get_a_graph_of_the_gradient_when_they_need_one(one_package, workload):
    found, _ = peers.installed_peers()
    for each in found:
        training = each.start(make_task(TINY[workload], device=CPU, channels_last=False, seed=0), "eager")
        for _ in range(11):
            assert training.step().isfinite()
    with_graph = [[step for step, saw in enumerate(peer.saw_graph) if saw] for peer in Peer.made]
    assert with_graph == [list(range(11)), [0, 10], [0, 10], [], []]
    assert Peer.made[1].settings["update_period"] == 10


def test_muon_gets_the_hidden_matrices(one_package):
    muon = peers.installed_peers()[0][-1]
    task = make_task(TINY["gpt"], device=CPU, channels_last=False, seed=0)
    hidden, others = muon.start(task, "eager").optimizer.param_groups
    names = {param: name for name, param in task.model.named_parameters()}
    assert {names[param].rpartition(".")[0].rpartition(".")[2] for param in hidden["params"]} == {
        "qkv",
        "out",
        "up",
        "down",
    }
    assert hidden["use_muon"]
    assert not others["use_muon"]
    assert len(hidden["params"]) + len(others["params"]) == len(names)
