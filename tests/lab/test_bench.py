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

from adahessian.lab.bench import whole_step
from adahessian.lab.bench.memory import state_bytes
from adahessian.lab.bench.update import UPDATES, measure_update
from adahessian.lab.bench.whole_step import BASELINE, LABELS, Clock, Job, Timed, measure_steps, median_ratio, prepare
from adahessian.lab.bench.workloads import WORKLOADS
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


def test_rounds_hold_whole_cycles_and_last_long_enough():
    log = []

    def costing(name, costs):
        def seconds(count):
            taken = log.count(name)
            log.extend([name] * count)
            return sum(costs[step % len(costs)] for step in range(taken, taken + count))

        return Timed(seconds, len(costs))

    timed = {"rare": costing("rare", [5.0, 1.0, 1.0, 1.0]), "even": costing("even", [2.0])}
    times = Clock(rounds=3, min_seconds=9).in_rounds(timed)
    assert times == {"rare": [2.0] * 3, "even": [2.0] * 3}
    assert log == ["rare"] * 4 + ["even"] + 3 * (["rare"] * 8 + ["even"] * 5)


def test_ratios_are_taken_within_rounds():
    # The machine was three times slower in the second round.
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
    ]
    _, diverged, muon, failed, died = measure_steps(jobs, clock=ONCE, at_once=5)
    assert "finite" in diverged["error"]
    assert "step_ms" not in diverged
    assert muon["ratio"] > 0
    assert failed["error"] == "broken"
    assert "code 7" in died["error"]


def fail(message, model, batch):
    raise RuntimeError(message)


def die(model, batch):
    os._exit(7)


def test_a_failed_baseline_leaves_times_without_ratios():
    jobs = jobs_of(WORKLOADS["digits"], "eager", baseline=replace(LABELS["adamw"], lr=1e30), adamw=LABELS["adamw"])
    failed, adamw = measure_steps(jobs, clock=ONCE)
    assert "finite" in failed["error"]
    assert (adamw["ratio"], adamw["memory_ratio"]) == (None, None)
    assert adamw["step_ms"] > 0


def test_compiled_steps_say_so():
    workload = replace(WORKLOADS["digits"], model=partial(Flat, 8), batch_size=4)
    for label, kind in {BASELINE: "compiled", "adahessian": "compiled", "sophia": "mixed"}.items():
        config = LABELS["sgd" if label == BASELINE else label]
        assert prepare(Job(workload, "captured", label, config, CPU))[1]["step"] == kind


class Flat(nn.Sequential):
    """Two layers, which compile in no time."""

    def __init__(self, width):
        super().__init__(nn.Flatten(), nn.Linear(192, width), nn.Tanh(), nn.Linear(width, 10))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no CUDA graphs without a GPU")
@pytest.mark.parametrize("label", [BASELINE, "sgd", "adahessian-kron"])
def test_captured_steps_equal_eager_ones(label, monkeypatch):
    name = "adamw" if label == BASELINE else label
    monkeypatch.setitem(LABELS, name, replace(LABELS[name], lr=1e-2))
    changes = []
    # The baseline takes three steps before its capture, which takes none itself.
    for mode, steps in (("eager", 8), ("captured", 5 if label == BASELINE else 8)):
        before, _ = WORKLOADS["lstm"].build(torch.device("cuda"), 0)
        training = whole_step.start(Job(WORKLOADS["lstm"], mode, label, LABELS[name], torch.device("cuda")))
        for _ in range(steps):
            training()
        pairs = zip(training.model.parameters(), before.parameters(), strict=True)
        changes.append(torch.cat([(param - initial).detach().flatten() for param, initial in pairs]))
    torch.testing.assert_close(changes[1], changes[0], rtol=1e-2, atol=1e-4)


def test_updates_of_all_optimizers_take_turns():
    rows = {
        row["label"]: row
        for row in measure_update(UPDATES[1:], partial(nn.Linear, 64, 64, bias=False), clock=ONCE, device=CPU)
    }
    assert tuple(rows) == UPDATES
    assert rows["adamw"]["ratio"] == 1
    assert rows["muon"]["ratio"] > 0
    assert rows["adamw"]["state_bytes_per_parameter"] == 8
    assert rows["adahessian"]["state_bytes_per_parameter"] == pytest.approx(4 + 4 / 32)


def test_state_counts_without_scalars():
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param] = {"step": torch.tensor(1.0), "a": torch.ones(2), "b": [torch.ones(3), (torch.ones(1),)]}
    assert state_bytes(optimizer) == 4 * (2 + 3 + 1)


@pytest.mark.parametrize("name", ["digits", "lstm"])
def test_workloads_depend_on_the_seed_alone(name):
    torch.manual_seed(1)
    (model, batch), (other, its_batch) = (WORKLOADS[name].build(CPU, 3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(batch, its_batch, strict=True))
    assert WORKLOADS[name].loss(model, batch).isfinite()
