"""`adahessian bench`: its cells, options, times and tables."""

import io
import json
import math
from dataclasses import replace

import pytest
import torch
from bench_cases import (
    CONDITIONS,
    CPU,
    MORE_OF_OVERHEAD,
    ONCE,
    PROBES,
    SHAPES,
    TINY,
    TINY_SHAPES,
    WHOLE_STEPS,
    bench,
    cell,
)
from rich.console import Console
from torch.optim import SGD

from adahessian.lab import command
from adahessian.lab.bench import cells, contenders, tables, timing, update
from adahessian.lab.bench.command import PARTS, Bench
from adahessian.lab.bench.contenders import CONTENDERS, REFERENCE, Contender
from adahessian.lab.bench.timing import Candidate, Stopwatch
from adahessian.lab.bench.training import plain
from adahessian.lab.bench.whole_step import measure_whole_steps
from adahessian.lab.bench.workloads import make_task

pytestmark = pytest.mark.usefixtures("tiny_bench")


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("bench") / "results" / "bench.json"


@pytest.fixture(scope="module")
def whole_run(output, tiny_bench):
    return bench(output=output)


@pytest.fixture
def printed(whole_run):
    return whole_run[0]


@pytest.fixture
def results(whole_run):
    return whole_run[1]


# The whole run -------------------------------------------------------------------------------------------------------


def test_every_part_has_its_cells(results):
    expected = {f"steps/{workload}/eager/{name}" for workload in TINY for name in WHOLE_STEPS}
    expected |= {f"steps/{workload}/eager/{name}" for workload in tables.PAPER_OVERHEAD for name in MORE_OF_OVERHEAD}
    sizes = ("batch 4, depth 8, width 4", "batch 1", "batch 16", "depth 20", "depth 32", "width 2", "width 8")
    expected |= {f"growth/resnet20, {size}/eager/{name}" for size in sizes for name in ("SGD", "AdaHessian, 1 probe")}
    expected |= {f"growth/resnet20, {sizes[0]}/eager/AdaHessian, {count} probes" for count in (2, 4)}
    expected |= {f"update/{shapes}/eager/{name}" for shapes in TINY_SHAPES for name in update.NAMES}
    assert results["cells"].keys() == expected


def test_cells_have_times_ratios_and_state(results):
    for key, found in results["cells"].items():
        if "more than there is" in key:
            continue
        assert found["milliseconds"] > 0, found
        if found["part"] == "steps":
            beside = results["cells"][f"steps/{found['workload']}/eager/AdamW"]
            assert found["time_to_adamw"] == pytest.approx(found["time_to_sgd"] / beside["time_to_sgd"])
            assert found["compile_seconds"] > 0
            assert found["peak_bytes"] is found["peak_to_sgd"] is None
    assert results["cells"]["steps/gpt/eager/SGD"]["time_to_sgd"] == 1
    assert results["cells"]["steps/gpt/eager/SGD"]["state_bytes_per_parameter"] == 4
    assert results["cells"]["steps/gpt/eager/AdamW"]["state_bytes_per_parameter"] == 8
    assert results["cells"]["steps/gpt/eager/SGD"]["curvature"] is None
    assert "double backward" in results["cells"]["steps/gpt/eager/AdaHessian, every step"]["curvature"]
    assert 4 < results["cells"]["steps/gpt/eager/AdaHessian, every step"]["state_bytes_per_parameter"] < 8


def test_results_say_where_they_come_from_and_which_peers_are_missing(results, output):
    assert {"command", "commit", "date", "seed", "hardware", "versions"} == results["provenance"].keys()
    conditions = {"device": "cpu", "channels_last": False, "seed": 0, "tf32": False, "cudnn_benchmark": False}
    assert conditions.items() <= results["conditions"].items()
    assert {"rounds": 1, "min_seconds": 1e-9}.items() <= results["conditions"].items()
    assert results["conditions"]["workloads"]["resnet20"] == {"batch_size": 4, "depth": 8, "width": 4}
    assert "pytorch_optimizer.Muon" in results["peers_not_found"]
    assert "torch_optimizer.Adahessian, every step" in results["peers_not_found"]
    assert [path.name for path in output.parent.iterdir()] == ["bench.json"]


def test_it_prints_each_cell_each_table_and_what_is_missing(results, printed, output):
    for found in results["cells"].values():
        assert f"{found['workload']}  {found['mode']}  {found['optimizer']}: " in printed
    for part in ("The whole training step", "overhead table", "How the cost grows", "The update alone", str(output)):
        assert part in printed
    assert "not installed: pytorch_optimizer.AdaHessian" in printed


def test_the_overhead_table_stands_beside_the_papers(results, printed):
    lines = printed[printed.index("overhead table") :].splitlines()
    rows = [line.split()[-4:] for line in lines if "every 5 steps" in line]
    for workload in tables.PAPER_OVERHEAD:
        ours = results["cells"][f"steps/{workload}/eager/AdaHessian, every 5 steps"]
        papers = (tables.PAPER_OVERHEAD[workload][ratio][-1] for ratio in ("time_to_sgd", "time_to_adam"))
        beside = zip((ours["time_to_sgd"], ours["time_to_adam"]), papers, strict=True)
        assert [f"{number:.2f}" for pair in beside for number in pair] in rows


def test_a_run_of_some_parts_keeps_the_others(results, output, tmp_path):
    copy = tmp_path / "bench.json"
    earlier = json.loads(output.read_text())
    measured = {"steps/gpt/eager/SGD", "steps/gpt/eager/AdamW"}
    for key in measured:
        earlier["cells"][key]["milliseconds"] = -1.0  # what no clock measures
    copy.write_text(json.dumps(earlier))
    _, again = bench(output=copy, parts=("steps",), workloads=("gpt",), optimizers=("AdamW",))
    assert again["cells"].keys() == results["cells"].keys()
    changed = {
        key
        for key in again["cells"]
        if again["cells"][key].get("milliseconds") != earlier["cells"][key].get("milliseconds")
    }
    assert changed == measured
    assert len(again["commands"]) == 2


def test_an_interrupted_run_keeps_and_shows_what_it_has(tmp_path, monkeypatch, capsys):
    def interrupted(*arguments, **settings):
        yield "SGD", {"milliseconds": 1.0, "time_to_sgd": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setattr("adahessian.lab.bench.command.measure_whole_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Bench(device="cpu", output=tmp_path / "bench.json").run()
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept["cells"].keys() == {"steps/resnet20/eager/SGD"}
    printed = capsys.readouterr().out
    assert "The whole training step" in printed
    assert str(tmp_path / "bench.json") in printed


def test_an_interrupt_while_it_starts_is_no_traceback(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_parse", interrupted)
    with pytest.raises(SystemExit) as exit_:
        command.main(["bench"])
    assert exit_.value.code == 130
    assert capsys.readouterr().err == "adahessian: stopped\n"


def test_brackets_in_a_reason_are_printed_as_they_are(tmp_path, monkeypatch):
    def failing(*arguments, **settings):
        yield "SGD", {"unavailable": "RuntimeError: [/tmp] is full"}

    monkeypatch.setattr("adahessian.lab.bench.command.measure_whole_steps", failing)
    printed, _ = bench(output=tmp_path / "bench.json", parts=("steps",), workloads=("gpt",))
    assert printed.count("[/tmp] is full") == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "--rounds"),
        ({"min_seconds": 0.0}, "--min-seconds"),
        ({"min_seconds": -1.0}, "--min-seconds"),
        ({"min_seconds": math.nan}, "--min-seconds"),
        ({"min_seconds": math.inf}, "--min-seconds"),
        ({"parts": ()}, "--parts"),
        ({"workloads": ()}, "--workloads"),
        ({"parts": ("overhead",), "workloads": ("gpt", "lstm")}, "--workloads resnet20 resnet32"),
        ({"modes": ("captured",)}, "GPU"),
        ({"device": "cuda"}, "--device cuda"),
    ],
)
def test_what_cannot_be_done_is_refused(settings, message, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=message):
        Bench(**{"device": "cpu", "output": tmp_path / "bench.json", **settings}).run()
    assert not any(tmp_path.iterdir())


# Optimizers by name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"parts": ("steps",), "optimizers": ("Adam", "adamw")}, WHOLE_STEPS),
        # There is such a name, but only on resnets.
        ({"parts": ("steps", "overhead"), "optimizers": (MORE_OF_OVERHEAD[0],)}, WHOLE_STEPS),
        ({"parts": ("update",), "optimizers": ("SGD",)}, update.NAMES),
        ({"parts": ("growth",), "optimizers": ("AdamW",)}, ["SGD", *(f"AdaHessian, {n}" for n in PROBES)]),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_those_that_are(settings, names, tmp_path):
    with pytest.raises(SystemExit) as refusal:
        Bench(device="cpu", workloads=("gpt", "lstm"), output=tmp_path / "bench.json", **settings).run()
    first, *listed = str(refusal.value).splitlines()
    assert f"--optimizers {settings['optimizers'][-1]}: no name begins so" in first
    assert listed == [f"  {name}" for name in names]


def test_a_name_of_a_missing_package_is_said_to_be_not_installed(tmp_path):
    with pytest.raises(SystemExit, match=r"  pytorch_optimizer\.Muon \(not installed\)"):
        Bench(device="cpu", optimizers=("pytorch_optimizer",), output=tmp_path / "bench.json").run()


@pytest.mark.parametrize(
    ("part", "beginning", "names"),
    [
        ("steps", "SGD", {"SGD"}),
        ("steps", "AdamW", {"SGD", "AdamW"}),
        ("growth", "AdaHessian, 2", {"SGD", "AdaHessian, 2 probes"}),
        ("update", "AdamW", {"AdamW", update.COPY_NAME}),
        ("update", "AdaHessian, block 32", {"AdamW", update.COPY_NAME, "AdaHessian, block 32"}),
    ],
)
def test_a_name_chooses_in_every_part(part, beginning, names, tmp_path):
    _, found = bench(output=tmp_path / "bench.json", parts=(part,), workloads=("lstm",), optimizers=(beginning,))
    assert {each["optimizer"] for each in found["cells"].values()} == names


def test_settings_become_options(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(Bench, "run", lambda self: ran.append(self))
    command.main(["bench", "--parts", "update", "steps", "--modes", "eager", "compiled", "--channels-last"])
    assert ran == [Bench(parts=("update", "steps"), modes=("eager", "compiled"), channels_last=True)]
    assert PARTS == ("steps", "overhead", "growth", "update", "kernels")


# Times ---------------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that candidates move on."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.log = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def candidate(self, name, costs):
        """A candidate whose steps cost these seconds, over and over."""
        calls = 0

        def step():
            nonlocal calls
            self.now += costs[calls % len(costs)]
            calls += 1
            self.log.append(name)

        return Candidate(step, len(costs))


def test_turns_hold_whole_periods_and_last_long_enough(monkeypatch):
    clock = Clock(monkeypatch)
    candidates = {"dear": clock.candidate("dear", [5.0, 1.0, 1.0, 1.0]), "even": clock.candidate("even", [2.0])}
    seconds = Stopwatch(device=CPU, rounds=3, min_seconds=9).in_turns(candidates)
    assert seconds == {"dear": [2.0] * 3, "even": [2.0] * 3}
    first_look = ["dear"] * 4 + ["even"]
    assert clock.log == first_look + 3 * (["dear"] * 8 + ["even"] * 5)


def test_a_ratio_is_taken_within_a_round():
    # The machine was three times slower in the second round.
    assert timing.median_ratio([2.0, 6.0, 2.2], to=[1.0, 3.0, 1.0]) == 2.0


def test_times_are_compared_by_way_of_sgd():
    adamw = cell("AdamW", milliseconds=100.0, time_to_sgd=1.5, peak_bytes=200)
    sgd = cell("SGD", milliseconds=1.0, time_to_sgd=1.0, peak_bytes=100)
    ours = cells.with_ratios(
        cell("AdaHessian", milliseconds=7.0, time_to_sgd=3.0, peak_bytes=300), {"SGD": sgd, "AdamW": adamw}
    )
    assert (ours["time_to_sgd"], ours["time_to_adamw"]) == (3.0, 2.0)
    assert (ours["peak_to_sgd"], ours["peak_to_adamw"]) == (3.0, 1.5)
    assert ours["time_to_adam"] is None


def test_a_schedule_is_that_of_the_optimizer():
    started = []
    every_three = next(each for each in CONTENDERS if MORE_OF_OVERHEAD[1] in each.schedules).only(MORE_OF_OVERHEAD[1:2])

    def start(task, mode):
        started.append(every_three.start(task, mode))
        return started[0]

    _, (name, found) = measure_whole_steps(
        TINY["gpt"], "eager", [replace(every_three, start=start)], conditions=CONDITIONS, stopwatch=ONCE
    )
    assert name == MORE_OF_OVERHEAD[1]
    assert found["milliseconds"] > 0
    for group in started[0].optimizer.param_groups:
        # One step, three to warm up, three to see how long they take, three that count, and one for the loss.
        assert group["steps"] == 1 + 3 + 3 + 3 + 1
        assert group["measurements"] == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no CUDA graphs without a GPU")
@pytest.mark.parametrize("contender", [REFERENCE, *CONTENDERS[:2]], ids=lambda each: next(iter(each.schedules)))
def test_captured_steps_are_the_plain_ones(contender, monkeypatch):
    monkeypatch.setattr(contenders, "LR", 1e-2)
    changes = []
    # Three steps warm up before the capture, which takes none itself.
    for mode, steps in (("eager", 8), ("captured", 5)):
        task = make_task(TINY["lstm"], device=torch.device("cuda"), channels_last=False, seed=0)
        before = torch.cat([param.detach().flatten() for param in task.parameters])
        training = contender.start(task, mode)
        for _ in range(steps):
            training.step()
        changes.append(torch.cat([param.detach().flatten() for param in task.parameters]) - before)
    torch.testing.assert_close(changes[1], changes[0], rtol=1e-2, atol=1e-4)


# Cells without numbers -----------------------------------------------------------------------------------------------


def test_what_fails_says_why_and_the_others_go_on():
    def broken(task, mode):
        raise RuntimeError("it broke\nin many words")

    def diverging(task, mode):
        return plain(task, SGD(task.parameters, lr=math.inf), mode)

    entrants = [
        Contender(schedules={"broken": 1, "broken too": 2}, start=broken),
        Contender(schedules={"diverging": 1}, start=diverging),
        CONTENDERS[0],
    ]
    found = dict(measure_whole_steps(TINY["gpt"], "eager", entrants, conditions=CONDITIONS, stopwatch=ONCE))
    assert list(found) == ["SGD", "broken", "broken too", "diverging", "Adam"]
    assert found["broken"] == found["broken too"] == {"unavailable": "RuntimeError: it broke"}
    assert found["diverging"]["unavailable"] == "ArithmeticError: the loss has become nan"
    assert found["Adam"]["time_to_sgd"] > 0


def test_without_sgd_times_have_no_ratio():
    entrants = [Contender(schedules={"as written": 1}, start=lambda task, mode: CONTENDERS[0].start(task, "eager"))]
    found = dict(measure_whole_steps(TINY["lstm"], "compiled", entrants, conditions=CONDITIONS, stopwatch=ONCE))
    assert "LSTM" in found["SGD"]["unavailable"]
    assert found["as written"]["milliseconds"] > 0
    assert found["as written"]["time_to_sgd"] is None


# Tables --------------------------------------------------------------------------------------------------------------


def lines_of(cells, width):
    console = Console(width=width, file=io.StringIO())
    for table in tables.tables(cells):
        console.print(table)
    return console.file.getvalue().splitlines()


def of_a_gpu(cell):
    numbers = {"milliseconds": 1234.5, "time_to_sgd": 12.345, "time_to_adamw": 12.345, "peak_to_sgd": 1.5}
    return {"compile_seconds": 120.0, "bytes_per_second": 4e12, **cell, **numbers}


def test_tables_fit_80_columns_with_every_name_in_one_piece(results):
    # Whatever was measured: a stall would make a column wider.
    fixed = dict.fromkeys(("time_to_sgd", "time_to_adam", "time_to_adamw"), 12.34) | {"milliseconds": 123.45}
    cells = {
        key: cell | {name: value for name, value in fixed.items() if cell.get(name) is not None}
        for key, cell in results["cells"].items()
        if "more than there is" not in key
    }
    lines = lines_of(cells, width=80)
    for found in cells.values():
        assert any(line.startswith(f"  {found['optimizer']} ") for line in lines), found["optimizer"]
        assert any(line.startswith(found["workload"]) for line in lines), found["workload"]
    assert not any("…" in line for line in lines)


def test_the_longest_names_give_way_between_words():
    names = [name for contender in CONTENDERS for name in contender.schedules]
    cells = {name: of_a_gpu(cell(name, "captured", state_bytes_per_parameter=4.1)) for name in names}
    lines = lines_of(cells, width=80)
    assert any(" ".join(line.split()) == "optimizer ms x SGD x AdamW peak state first" for line in lines)
    (row,) = (number for number, line in enumerate(lines) if line.startswith("  AdaHessian, every step, bf16"))
    assert lines[row].split()[-6:] == ["1234.50", "12.35", "12.35", "1.50", "4.1", "120"]
    assert lines[row + 1].strip() == "tangents"
    assert not any("…" in line for line in lines)


def test_a_table_gives_the_reason_once():
    missing = [cell(name, unavailable="RuntimeError: no") for name in ("Adam", "AdamW")]
    cells = {each["optimizer"]: each for each in (cell("SGD", milliseconds=1.0), *missing)}
    *_, adam, adamw, reason = lines_of(cells, width=80)
    assert (adam.strip(), adamw.strip()) == ("Adam", "AdamW")
    assert reason == "gpt, eager: not available: RuntimeError: no (Adam; AdamW)"


def test_numbers_that_nobody_has_take_no_column(results):
    heading = next(line for line in lines_of(results["cells"], width=80) if line.startswith("optimizer"))
    assert " ".join(heading.split()) == "optimizer ms x SGD x AdamW state first"


# The update alone ----------------------------------------------------------------------------------------------------


def test_bytes_moved_and_bytes_of_state(results):
    def numbers(name):
        found = results["cells"][f"update/matrices of 64 x 64/eager/{name}"]
        assert found["bytes_per_second"] == pytest.approx(
            found["bytes_moved_per_parameter"] * found["parameters"] / (found["milliseconds"] / 1e3)
        )
        return found["bytes_moved_per_parameter"], found["state_bytes_per_parameter"]

    assert numbers("AdamW") == (28, 8)
    assert numbers("AdaHessian, block 1") == (24, 8)
    assert numbers("AdaHessian, block 32") == (20 + 4 / 32, 4 + 4 / 32)
    copy = results["cells"][f"update/matrices of 64 x 64/eager/{update.COPY_NAME}"]
    assert copy["share_of_copy"] == 1
    assert copy["bytes_per_second"] == pytest.approx(2 * 2**20 / (copy["milliseconds"] / 1e3))


def test_what_does_not_fit_into_memory_is_not_tried(results):
    for name in update.NAMES:
        reason = results["cells"][f"update/more than there is/eager/{name}"]["unavailable"]
        assert reason.startswith("MemoryError: 54043196 GB are needed")


@pytest.mark.parametrize(("name", "count"), [("ResNet20 (0.27M)", 269_722), ("GPT-2 (124M)", 124_439_808)])
def test_shapes_are_those_of_the_networks(name, count):
    assert sum(map(math.prod, SHAPES[name]())) == count


# Conditions ----------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_everybody_the_same_task():
    first, second = (make_task(TINY["gpt"], device=CPU, channels_last=False, seed=3) for _ in range(2))
    for one, other in zip(first.parameters, second.parameters, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(first.batch[0], second.batch[0])


@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_come_last_where_that_is_asked_for(channels_last):
    task = make_task(TINY["resnet20"], device=CPU, channels_last=channels_last, seed=0)
    kernels = [param for param in task.parameters if param.dim() == 4]
    for tensor in (task.batch[0], *kernels[1:]):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_what_a_measurement_sends_between_processes_is_counted(results):
    for found in results["cells"].values():
        sent = found.get("reduced_bytes_per_parameter")
        if found["part"] == "steps" and "milliseconds" in found:
            assert (sent is not None) == found["optimizer"].startswith("AdaHessian"), found
            assert sent is None or 4 < sent < 8.1
