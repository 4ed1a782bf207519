"""The benchmark at sizes that take no time."""

import contextlib
import io
import json

import torch

from adahessian.lab.bench import update
from adahessian.lab.bench.command import Bench
from adahessian.lab.bench.conditions import Conditions
from adahessian.lab.bench.timing import Stopwatch
from adahessian.lab.bench.workloads import GPTTokens, Images, LSTMTokens

CPU = torch.device("cpu")
CONDITIONS = Conditions(device="cpu", channels_last=False, seed=0)
ONCE = Stopwatch(device=CPU, rounds=1, min_seconds=0)
TINY = {
    "resnet20": Images(depth=8, width=4, batch_size=4),
    "resnet32": Images(depth=8, width=2, batch_size=4),
    "gpt": GPTTokens(depth=2, width=8, heads=2, vocabulary=16, length=4, batch_size=4),
    "gpt2": GPTTokens(depth=2, width=8, heads=2, vocabulary=16, length=4, batch_size=4, bfloat16=True),
    "lstm": LSTMTokens(depth=2, width=8, vocabulary=16, length=4, batch_size=4),
}
SHAPES = update.SHAPES
TINY_SHAPES = {"matrices of 64 x 64": lambda: [(64, 64)] * 2, "more than there is": lambda: [(2**50,)]}
ON_A_QUARTER = [f"AdaHessian, every {n} steps on a quarter" for n in (10, 20)]
WHOLE_STEPS = ["SGD", "Adam", "AdamW", "AdaHessian, every step", *ON_A_QUARTER]
PROBES = ["1 probe", "2 probes", "4 probes"]
MORE_OF_OVERHEAD = [f"AdaHessian, every {n} steps" for n in (2, 3, 4, 5)]


def bench(**settings):
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        # Where there is a GPU, too: there it would measure networks of real size, in every mode.
        on_cpu = {"device": "cpu", "channels_last": False}
        Bench(**{"rounds": 1, "min_seconds": 1e-9, **on_cpu, **settings}).run()
    return stdout.getvalue(), json.loads(settings["output"].read_text())


def cell(optimizer, mode="eager", **numbers):
    return {"part": "steps", "workload": "gpt", "mode": mode, "optimizer": optimizer, **numbers}
