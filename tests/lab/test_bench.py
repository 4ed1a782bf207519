"""Time and memory of training steps."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from adahessian.lab.bench.jobs import BASELINE, Job, prepare, start, state_bytes
from adahessian.lab.bench.measure import Clock, measure, median_ratio
from adahessian.lab.bench.workloads import LABELS, WORKLOADS
from adahessian.lab.commands import bench
from adahessian.lab.errors import ConfigError, RunExistsError
from adahessian.lab.results import frames

CPU = torch.device("cpu")
ONCE = Clock(rounds=1, min_seconds=1e-6)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The workload of digits with four images, and short rounds."""
    monkeypatch.setitem(WORKLOADS, "digits", replace(WORKLOADS["digits"], batch_size=4))
    monkeypatch.setattr(bench, "Clock", partial(Clock, min_seconds=1e-6))
    monkeypatch.setattr("adahessian.lab.training.provenance.commit", lambda: "abc")


def run(output, *argv):
    bench.main(["--workloads", "digits", "--modes", "eager", "--rounds", "2", "--output", str(output), *argv])
    return json.loads(output.read_text())["rows"] if output.exists() else None


def test_rows_are_printed_and_written(tmp_path, capsys):
    rows = run(tmp_path / "bench.json", "--optimizers", "adamw", "adahessian-kron/every-*")
    labels = [BASELINE, "adamw", "adahessian-kron/every-10", "adahessian-kron/every-20"]
    assert [row["label"] for row in rows] == labels
    assert all(row["step_ms"] > 0 and row["ratio"] > 0 and len(row["round_ms"]) == 2 for row in rows)
    assert rows[0]["ratio"] == 1
    assert rows[1]["state_bytes_per_parameter"] == 8
    assert rows[3]["config"]["curvature_every"] == 20
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == labels
    read = frames.bench([tmp_path])
    assert (read.label.tolist(), set(read.commit)) == (labels, {"abc"})


def test_rows_survive_an_interruption(tmp_path, monkeypatch):
    def interrupted(row):
        if row["label"] == "muon":
            raise KeyboardInterrupt
        return line(row)

    line = bench._line
    monkeypatch.setattr(bench, "_line", interrupted)
    output = tmp_path / "bench.json"
    with pytest.raises(KeyboardInterrupt):
        run(output, "--optimizers", "adamw", "muon")
    assert [row["label"] for row in json.loads(output.read_text())["rows"]] == [BASELINE, "adamw"]
    with pytest.raises(RunExistsError, match=r"bench\.json"):
        run(output)


@pytest.mark.parametrize("label", [label for label in LABELS if "/" not in label])
def test_every_optimizer_can_be_prepared(label):
    training, row = prepare(Job(WORKLOADS["digits"], "eager", label, LABELS[label], CPU))
    assert row["step"] == "eager"
    assert training().isfinite()


def test_a_table_has_at_most_twenty_lines():
    assert len([BASELINE, *LABELS]) <= 20


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--optimizers", "adamv"], "adamw"),
        (["--workloads", "digit"], "digits"),
        (["--rounds", "0"], "--rounds"),
        (["--at-once", "0"], "--at-once"),
        (["--workloads", "gpt2-124m"], "gpt2-124m"),
    ],
)
def test_invalid_options_are_named(tmp_path, argv, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=name):
        run(tmp_path / "bench.json", *argv)


def test_nothing_but_torch_and_tyro_is_needed():
    missing = ["matplotlib", "pandas", "pytorch_optimizer", "rich", "scipy", "sklearn"]
    code = f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
    code += "from adahessian.lab.command import main; main(['bench', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "--at-once" in done.stdout, done.stderr


class Costing:
    def __init__(self, name, costs, log):
        self.name, self.costs, self.log, self.cycle = name, costs, log, len(costs)

    def seconds(self, count):
        taken = self.log.count(self.name)
        self.log.extend([self.name] * count)
        return sum(self.costs[step % self.cycle] for step in range(taken, taken + count))


def test_rounds_hold_whole_cycles_and_last_long_enough():
    log = []
    turns = {"rare": Costing("rare", [5.0, 1.0, 1.0, 1.0], log), "even": Costing("even", [2.0], log)}
    times = Clock(rounds=3, min_seconds=9).in_rounds(turns)
    assert times == {"rare": [2.0] * 3, "even": [2.0] * 3}
    assert log == ["rare"] * 4 + ["even"] + 3 * (["rare"] * 8 + ["even"] * 5)
    # Ratios are taken within rounds. The machine was three times slower in the second round.
    assert median_ratio([2.0, 6.0, 2.2], [1.0, 3.0, 1.0]) == 2.0


def jobs_of(workload, mode, **configs):
    return [Job(workload, mode, label, config, CPU) for label, config in configs.items()]


def test_failures_do_not_end_the_benchmark():
    adam, adamw = LABELS["adam"], LABELS["adamw"]
    broken = partial(fail, "broken\nin many words")
    unusable = replace(WORKLOADS["digits"], loss=broken)
    jobs = [
        *jobs_of(WORKLOADS["digits"], "eager", baseline=adam, adamw=replace(adamw, lr=1e30), muon=LABELS["muon"]),
        *jobs_of(unusable, "eager", baseline=adam),
        *jobs_of(replace(unusable, loss=die), "eager", baseline=adam),
        *jobs_of(replace(WORKLOADS["digits"], batch_size=3), "eager", baseline=replace(adamw, lr=1e30), adamw=adamw),
    ]
    _, diverged, muon, failed, died, failed_baseline, without = measure(jobs, clock=ONCE, at_once=7)
    assert "finite" in diverged["error"]
    assert "step_ms" not in diverged
    assert muon["ratio"] > 0
    assert failed["error"] == "broken"
    assert "code 7" in died["error"]
    assert "finite" in failed_baseline["error"]
    assert (without["ratio"], without["memory_ratio"], without["step_ms"] > 0) == (None, None, True)


def fail(message, model, batch):
    raise RuntimeError(message)


def die(model, batch):
    os._exit(7)


def test_compiled_steps_say_so():
    layers = (nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 10))  # which compile in no time
    workload = replace(WORKLOADS["digits"], model=lambda: nn.Sequential(*layers), batch_size=4)
    for label, kind in {BASELINE: "compiled", "adahessian": "compiled", "sophia": "mixed"}.items():
        config = LABELS["sgd" if label == BASELINE else label]
        assert prepare(Job(workload, "captured", label, config, CPU))[1]["step"] == kind


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no CUDA graphs without a GPU")
@pytest.mark.parametrize("label", [BASELINE, "sgd", "adahessian-kron"])
def test_captured_steps_equal_eager_ones(label, monkeypatch):
    name = "adamw" if label == BASELINE else label
    monkeypatch.setitem(LABELS, name, replace(LABELS[name], lr=1e-2))
    changes = []
    # The baseline takes three steps before its capture, which takes none itself.
    for mode, steps in (("eager", 8), ("captured", 5 if label == BASELINE else 8)):
        before, _ = WORKLOADS["lstm"].build(torch.device("cuda"))
        training = start(Job(WORKLOADS["lstm"], mode, label, LABELS[name], torch.device("cuda")))
        for _ in range(steps):
            training()
        pairs = zip(training.model.parameters(), before.parameters(), strict=True)
        changes.append(torch.cat([(param - initial).detach().flatten() for param, initial in pairs]))
    torch.testing.assert_close(changes[1], changes[0], rtol=1e-2, atol=1e-4)


def test_updates_alone():
    workload = replace(WORKLOADS["digits"], model=partial(nn.Linear, 64, 64, bias=False))  # which has no loss
    jobs = jobs_of(workload, "update", baseline=LABELS["adamw"], muon=LABELS["muon"], adahessian=LABELS["adahessian"])
    rows = {row["label"]: row for row in measure(jobs, clock=ONCE, at_once=3)}
    assert rows[BASELINE]["ratio"] == 1
    assert all(row["ratio"] > 0 for row in rows.values())
    assert rows[BASELINE]["state_bytes_per_parameter"] == 8
    assert rows["adahessian"]["state_bytes_per_parameter"] == pytest.approx(4 + 4 / 32)


def test_state_counts_without_scalars():
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param] = {"step": torch.tensor(1.0), "a": torch.ones(2), "b": [torch.ones(3), (torch.ones(1),)]}
    assert state_bytes(optimizer) == 4 * (2 + 3 + 1)


@pytest.mark.parametrize("name", ["digits", "lstm"])
def test_workloads_are_the_same_each_time(name):
    torch.manual_seed(1)
    (model, batch), (other, its_batch) = (WORKLOADS[name].build(CPU) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(batch, its_batch, strict=True))
    assert WORKLOADS[name].loss(model, batch).isfinite()
