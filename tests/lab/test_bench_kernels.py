"""Kernels of a step: counted, timed and named."""

import time

import pytest
import torch
from bench_cases import CONDITIONS, CPU, TINY, WHOLE_STEPS, bench

from adahessian.lab.bench.conditions import Conditions
from adahessian.lab.bench.contenders import CONTENDERS, Contender
from adahessian.lab.bench.kernels import kernels_of, profile_whole_steps

pytestmark = pytest.mark.usefixtures("tiny_bench")


@pytest.fixture(scope="module")
def profiled(tiny_bench, tmp_path_factory):
    output = tmp_path_factory.mktemp("kernels") / "bench.json"
    return bench(output=output, parts=("kernels",), workloads=("gpt",), optimizers=("AdamW", "AdaHessian"))


def test_kernels_of_a_step_are_counted_and_the_longest_named(profiled):
    names = ["SGD", *(name for name in WHOLE_STEPS if name.startswith(("AdamW", "AdaHessian")))]
    cells = profiled[1]["cells"]
    assert list(cells) == [f"kernels/gpt/eager/{name}" for name in names]
    for found in cells.values():
        times = [kernel["milliseconds"] for kernel in found["longest"]]
        assert times == sorted(times, reverse=True)
        assert 0 < sum(times) <= found["milliseconds"]
    sgd, _, exact, quarter, rarer = (cell["launches"] for cell in cells.values())
    assert 2 * sgd < exact  # the products, beside the gradient
    assert sgd < quarter < sgd + (exact - sgd) / 2  # of ten steps, one measures
    assert sgd < rarer < quarter


def test_matrix_products_are_counted_for_one_step(profiled):
    # Two blocks of four linear layers each and the output: one product forward, two backward.
    sgd = next(iter(profiled[1]["cells"].values()))
    products = sum(each["launches"] for each in sgd["longest"] if each["name"] in ("aten::mm", "aten::addmm"))
    assert products == 3 * (2 * 4 + 1)


def test_the_table_of_kernels_names_the_longest(profiled):
    printed, results = profiled
    shown = printed[printed.index("Kernels of a step") :]
    for found in results["cells"].values():
        assert f"gpt, eager, {found['optimizer']}" in shown
        assert found["longest"][0]["name"][:40] in shown


def test_times_of_kernels_are_those_of_one_step():
    seconds = []
    matrix = torch.rand(300, 300)

    def step():
        started = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - started)

    found = kernels_of(step, 8, CPU)
    assert found["launches"] == pytest.approx(sum(kernel["launches"] for kernel in found["longest"]))
    # The profiler has a clock of its own, not quite like this one: no more than that it is one step, and not eight.
    assert 0 < found["milliseconds"] <= 2 * 1e3 * sum(seconds) / 8
    assert {kernel["name"]: kernel["launches"] for kernel in found["longest"]}["aten::mm"] == 1


def test_a_profile_of_nothing_is_none():
    with pytest.raises(RuntimeError, match="recorded nothing"):
        kernels_of(lambda: None, 1, CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no kernels without a GPU")
@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_kernels_of_a_gpu(mode):
    on_gpu = Conditions(device="cuda", channels_last=False, seed=0)
    found = dict(profile_whole_steps(TINY["gpt"], mode, CONTENDERS[1:2], conditions=on_gpu, rounds=1))
    assert list(found) == ["SGD", "AdamW"]
    for cell in found.values():
        assert cell["milliseconds"] > 0
        assert not any(kernel["name"].startswith(("aten::", "Optimizer.")) for kernel in cell["longest"])


def test_a_profile_that_fails_says_why():
    def broken(task, mode):
        raise RuntimeError("it broke")

    entrants = [Contender(schedules={"broken": 1}, start=broken), CONTENDERS[0]]
    found = dict(profile_whole_steps(TINY["gpt"], "eager", entrants, conditions=CONDITIONS, rounds=1))
    assert found["broken"] == {"unavailable": "RuntimeError: it broke"}
    assert found["Adam"]["launches"] > 0
