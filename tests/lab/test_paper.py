import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro
from report_cases import ECONOMICAL_ON_CIFAR, column, make_run, write
from torch import nn
from torch.func import functional_call

from adahessian.lab.bench.tables import NAMES_IN_OVERHEAD, PAPER_OVERHEAD
from adahessian.lab.paper import command, numbers
from adahessian.lab.paper.cells import Cell, runs_of
from adahessian.lab.paper.command import Paper
from adahessian.lab.paper.eigenvectors import hessian_product, leading_eigenpairs
from adahessian.lab.paper.missing import missing_benches, missing_runs
from adahessian.lab.paper.surface import UnknownBlockError, block_of, measure_surface
from adahessian.lab.paper.sweeps import other_sweep_tables, sweep_tables
from adahessian.lab.paper.tables import result_tables, stand_in_tables
from adahessian.lab.report.groups import group_runs
from adahessian.lab.tasks.registry import EXPERIMENTS
from adahessian.lab.train import parse_train

TABLES = [*result_tables(), *sweep_tables()]


def table_of(title, groups, tables=TABLES):
    (table,) = [table for table in tables if table.title.startswith(title)]
    return table.filled(groups)


# Tables --------------------------------------------------------------------------------------------------------------


def test_without_runs_every_cell_of_ours_is_empty():
    for table in TABLES:
        filled = table.filled([])
        assert {len(row) for row in filled.rows} == {len(filled.headings)}
        assert list(table.cells)
        for entries, row in zip(table.rows, filled.rows, strict=True):
            assert all(isinstance(entry, str) or not cell for entry, cell in zip(entries, row, strict=True))


def test_result_stands_beside_the_papers():
    groups = group_runs([make_run("sgd", seed, 92.0 + seed / 10) for seed in (1, 2)])
    table = table_of("Table 2", groups)
    assert column(table, "ResNet20, CIFAR-10, paper")["SGD"] == "92.08 ± 0.08"
    assert column(table, "ResNet20, CIFAR-10, ours")["SGD"] == "92.15 ± 0.07 (2 seeds)"
    assert column(table, "ResNet20, CIFAR-10, ours")["Adam"] == ""
    assert column(table, "ResNet32, ours")["SGD"] == ""


def test_runs_with_other_settings_fill_no_cell():
    groups = group_runs([make_run("sgd", epochs=5, momentum=0.5), make_run("sgd", seed=2, lr=0.3)])
    assert all(cell == "" for cell in column(table_of("Table 2", groups), "ResNet20, CIFAR-10, ours").values())


def test_most_seeds_count_under_several_conditions():
    on_cpu = {"device": "cpu", "precision": "float32", "compiled": False, "processes": 1}
    few = [make_run(seed=1, accuracy=10.0, conditions=on_cpu)]
    many = [make_run(seed=seed, accuracy=92.0) for seed in (1, 2)]
    for runs in (few + many, many + few):
        assert len(runs_of(Cell(task="cifar10-resnet20", optimizer="sgd"), group_runs(runs)).runs) == 2


def test_delays_and_their_costs():
    groups = group_runs(
        [
            make_run("sgd", step=0.002),
            make_run("adam", step=0.0025),
            make_run("adahessian", accuracy=92.2, step=0.005),
            make_run("adahessian", accuracy=92.3, step=0.004, update_every=2, measured_epochs=5.0),
            make_run("adahessian", accuracy=92.4, update_every=10, measured_epochs=5.0, step=0.0022),
            # Neither is the paper's delay.
            make_run("adahessian", accuracy=10.0, update_every=3),
            make_run("adahessian", accuracy=10.0, update_every=4, measured_epochs=5.0, batch_fraction=0.25),
            # With a learning rate of its own, and with that of --economical.
            make_run("adahessian", accuracy=20.0, update_every=3, lr=0.2),
            make_run("adahessian", accuracy=30.0, **ECONOMICAL_ON_CIFAR),
            make_run("adahessian", accuracy=40.0, **ECONOMICAL_ON_CIFAR | {"update_every": 20}),
            make_run("adahessian", accuracy=50.0, **ECONOMICAL_ON_CIFAR | {"num_probes": 4}),
        ]
    )
    table = table_of("Table 8: Hessian every so many steps, ResNet20", groups)
    rows = {row[0]: list(row[1:]) for row in table.rows}
    ours = ["92.20 (1 seed)", "92.30 (1 seed)", "", "", "", "92.40 (1 seed)", ""]
    assert rows["test accuracy, %, ours"] == ours
    assert rows["time of a step x SGD, ours"] == ["2.50", "2.00", "", "", "", "1.10", ""]
    assert rows["time of a step x Adam, ours"] == ["2.00", "1.60", "", "", "", "0.88", ""]
    assert rows["time of a step x SGD, paper"][:5] == ["2.42", "1.71", "1.47", "1.36", "1.28"]
    economical = table_of("AdaHessian with less curvature", groups, list(other_sweep_tables(groups)))
    assert [row[2] for row in economical.rows] == [f"{ours}.00 (1 seed)" for ours in (30, 10, 10, 40)]
    assert [row[3] for row in economical.rows] == ["92.20 (1 seed)"] * 4


def test_learning_rates_times_factors():
    lr = EXPERIMENTS["iwslt14-de-en"].defaults["adamw"].lr
    groups = group_runs(
        [
            make_run("adamw", task="iwslt14-de-en", accuracy=35.6),
            make_run("adamw", task="iwslt14-de-en", accuracy=35.1, lr=float(f"{3 * lr:.4g}")),
            make_run("adamw", task="iwslt14-de-en", lr=10 * lr, diverged=True),
            make_run("sgd", accuracy=91.0, lr=0.2),
        ]
    )
    (ours,) = [row for row in table_of("Table 6", groups).rows if row[0] == "AdamW, ours"]
    cells = ["", "35.60 (1 seed)", "", "35.10 (1 seed)", "", "", "", "diverged (1 seed)"]
    assert ours[1:] == cells
    elsewhere = table_of("Learning rate", groups, list(other_sweep_tables(groups)))
    assert elsewhere.headings == ["learning rate times", "1", "2"]
    assert elsewhere.rows == [["SGD", "", "91.00 (1 seed)"]]


def test_block_sizes():
    groups = group_runs(
        [
            make_run("adahessian", task="iwslt14-de-en", accuracy=35.7),
            make_run("adahessian", task="iwslt14-de-en", accuracy=35.5, block_size=4),
            make_run("adahessian", task="multi30k-de-en", accuracy=30.0, block_size=8),
        ]
    )
    sizes = column(table_of("Table 7", groups), "32"), column(table_of("Table 7", groups), "4")
    assert [size["AdaHessian, ours"] for size in sizes] == ["35.70 (1 seed)", "35.50 (1 seed)"]
    elsewhere = table_of("Block size", groups, list(other_sweep_tables(groups)))
    assert elsewhere.rows == [["AdaHessian", "30.00 (1 seed)", ""]]


def test_average_of_glue_only_when_all_are_there():
    def runs(columns):
        return group_runs(
            [
                make_run(
                    "adamw",
                    task=task,
                    final={EXPERIMENTS[task].metric.name: 80.0 + number, "dev_mismatched_accuracy": 87.0},
                )
                for number, (_, task, metric) in enumerate(columns)
                if metric is None
            ]
        )

    some = column(table_of("Table 5", runs(numbers.GLUE_COLUMNS[1:])), "average")
    assert some["AdamW, ours"] == ""
    table = table_of("Table 5", runs(numbers.GLUE_COLUMNS))
    assert column(table, "MNLI-mm")["AdamW, ours"] == "87.00 (1 seed)"
    assert column(table, "average")["AdamW, ours"] == "83.50"
    assert column(table, "average")["AdaHessian, ours"] == ""


def test_training_perplexity():
    final = {"test_perplexity": 60.0, "train_perplexity": 31.0}
    groups = group_runs([make_run("adamw", task="ptb-tensorized", final=final)])
    assert column(table_of("Figure 10", groups), "PTB, ours")["AdamW"] == "31.00 (1 seed)"
    assert column(table_of("Table 4", groups), "PTB, ours")["AdamW"] == "60.00 (1 seed)"


def test_stand_ins_have_tables_of_their_own():
    assert list(stand_in_tables([])) == []
    groups = group_runs(
        [
            make_run("adamw", task="multi30k-de-en", accuracy=33.0),
            make_run("sgd", task="image-folder-resnet18", accuracy=61.0, epochs=20),
            make_run("adahessian", task="image-folder-resnet18", accuracy=62.0, epochs=20),
            make_run("adahessian", task="image-folder-resnet18", accuracy=63.0, epochs=20, lr=0.3),
            make_run("adamw", task="glue-rte", accuracy=58.0, model="minilm-l6"),
            make_run("adamw", task="glue-rte", accuracy=59.0, lr=0.01),
            make_run("adagrad", task="criteo-dlrm", accuracy=78.0, file="some.txt", hash_size=100),
            make_run("adagrad", task="criteo-dlrm", accuracy=79.0, embedding_lr=0.1),
            make_run("sgd", batch_size=128),
        ]
    )
    (table,) = stand_in_tables(groups)
    assert "Stand-ins" in table.title
    assert "Not in the paper" in table.note
    resnet18 = "ResNet18 on a folder of images, 20 epochs"
    assert [[row[0], row[1], row[3]] for row in table.filled(groups).rows] == [
        [resnet18, "SGD", "61.00 (1 seed)"],
        [resnet18, "AdaHessian", "62.00 (1 seed)"],
        [resnet18, "AdaHessian, lr 0.3", "63.00 (1 seed)"],
        ["small Transformer on Multi30k, German to English", "AdamW", "33.00 (1 seed)"],
        ["Fine-tuning on RTE, model minilm-l6", "AdamW", "58.00 (1 seed)"],
        ["DLRM on Criteo's click logs, file some.txt, hash size 100", "Adagrad", "78.000 (1 seed)"],
    ]
    assert all(cell == "" for cell in column(table_of("Table 3", groups), "IWSLT14, ours").values())


def test_numbers_agree_with_those_of_the_tasks():
    for optimizer, results in numbers.GLUE.items():
        assert math.isclose(sum(results) / 8, numbers.GLUE_AVERAGE[optimizer], abs_tol=0.006)
        of_tasks = [
            EXPERIMENTS[task].paper[optimizer].mean for _, task, metric in numbers.GLUE_COLUMNS if metric is None
        ]
        assert list(results[:-1]) == of_tasks
    swept = EXPERIMENTS[numbers.SWEPT_TASK]
    for optimizer, sweep in numbers.LR_SWEEP.items():
        assert sweep[numbers.LR_FACTORS.index(1.0)] == swept.paper[optimizer]
    own_size = swept.defaults["adahessian"].block_size
    assert numbers.BLOCK_SWEEP[numbers.BLOCK_SIZES.index(own_size)] == swept.paper["adahessian"]
    for task, delayed in numbers.DELAYED.items():
        assert delayed[0].mean == EXPERIMENTS[task].paper["adahessian"].mean


# What is missing -----------------------------------------------------------------------------------------------------


def test_missing_cells_have_commands_that_fill_them():
    missing = missing_runs(TABLES, [])
    assert "adahessian train cifar10-resnet20 --optimizer sgd --seeds 1 2 3 4 5 --data-dir DIR" in missing
    runs = []
    for line in missing:
        train = parse_train(line.split()[2:])
        experiment = EXPERIMENTS[train.task]
        for seed in train.seeds:
            run = make_run(train.optimizer, seed, task=train.task)
            values = {"train_perplexity": 1.0, "dev_mismatched_accuracy": 1.0, experiment.metric.name: 1.0}
            settings = json.loads(json.dumps(vars(train.settings)))
            runs.append(replace(run, settings=settings, final=values))
    groups = group_runs(runs)
    assert missing_runs(TABLES, groups) == {}
    for table in TABLES:
        assert all(
            cell
            for entries, row in zip(table.rows, table.filled(groups).rows, strict=True)
            for entry, cell in zip(entries, row, strict=True)
            if isinstance(entry, Cell)
        )


def test_a_cell_with_some_seeds_lacks_the_others():
    groups = group_runs([make_run("sgd", seed) for seed in (1, 3)])
    missing = missing_runs(TABLES, groups)
    cells = missing["adahessian train cifar10-resnet20 --optimizer sgd --seeds 2 4 5 --data-dir DIR"]
    assert cells == ["Table 2: ResNet20 on CIFAR-10, SGD (2 of 5 seeds are there)"]


def test_missing_benches():
    commands = {f"adahessian bench --parts overhead --workloads {workload}" for workload in PAPER_OVERHEAD}
    assert missing_benches({}).keys() == commands
    assert missing_benches({"a": bench("cpu")}).keys() == commands
    assert len(missing_benches({"a": bench("cuda")})) == len(commands) - 1


def bench(device):
    cells = {
        name: {
            "part": "steps",
            "workload": "resnet20",
            "mode": "eager",
            "optimizer": name,
            "milliseconds": 5.0,
            "time_to_sgd": 2.345,
        }
        for name in NAMES_IN_OVERHEAD
    }
    return {
        "provenance": make_run().provenance[0],
        "conditions": {"device": device},
        "commands": [],
        "cells": cells,
    }


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_landscapes(monkeypatch):
    """Figures 1 and 3, which take half a minute, have tests of their own."""
    monkeypatch.setattr(command, "draw_landscapes", lambda folder: (folder / "figure1.png").touch())


@pytest.mark.usefixtures("no_landscapes")
def test_paper_is_written_from_runs_and_results(tmp_path, capsys):
    results = tmp_path / "results"
    write(make_run("sgd"), results)
    other = write(make_run("adahessian", task="digits"), tmp_path / "elsewhere")
    (results / "bench-cuda.json").write_text(json.dumps(bench("cuda")))
    (results / "bench-of-updates.json").write_text(json.dumps(bench("cuda") | {"cells": {}}))
    (results / "bench-broken.json").write_text("{")
    (mine := tmp_path / "mine.json").write_text(json.dumps(bench("cpu")))
    Paper(runs=(other, results, mine), output=tmp_path / "paper").run()
    text = (tmp_path / "paper" / "paper.md").read_text()
    assert "| SGD | 92.08 ± 0.08 | 92.00 (1 seed) |" in text
    assert "Stand-ins" in text
    assert text.count("| resnet20, eager: AdaHessian, every step | 5.00 | 2.35 | 2.42 |") == 2
    assert "mine.json" in text
    assert "bench-of-updates" not in text
    assert "Figure 7: curves, ResNet20 on CIFAR-10" in text
    assert "Figure 2" not in text
    drawn = [part.partition('"')[0] for part in text.split('<img src="')[1:]]
    assert len(drawn) == 8
    assert all((tmp_path / "paper" / name).exists() for name in drawn)
    assert "1 of 12" in capsys.readouterr().out


def test_missing_writes_nothing(tmp_path, capsys):
    write(make_run("sgd"), tmp_path / "results")
    Paper(runs=(tmp_path / "results",), output=tmp_path / "paper", missing=True).run()
    out = capsys.readouterr().out
    assert "adahessian train cifar10-resnet20 --optimizer sgd --seeds 2 3 4 5 --data-dir DIR" in out
    assert "commands to go" in out
    assert not (tmp_path / "paper").exists()


def test_runs_are_looked_for_in_the_folder_of_train(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = "(1 of 5 seeds are there)"
    Paper(missing=True).run()
    assert there not in capsys.readouterr().out
    write(make_run("sgd"), tmp_path / "runs")
    write(make_run("adam"), tmp_path / "results")
    Paper(missing=True).run()
    assert capsys.readouterr().out.count(there) == 1


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"adahessian paper: .*cannot be read"):
        Paper(runs=(tmp_path / "absent.json",), output=tmp_path / "paper").run()


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"adahessian paper: .*another --output"):
        Paper(runs=(tmp_path,), output=tmp_path / "file").run()


def test_command_line():
    arguments = ["a", "b.json", "--missing"]
    assert tyro.cli(Paper, args=arguments) == Paper(runs=(Path("a"), Path("b.json")), missing=True)
    arguments = ["--surface", "w.pt", "--task", "digits", "--block", "0"]
    assert tyro.cli(Paper, args=arguments) == Paper(surface=Path("w.pt"), task="digits", block="0")


# Figure 2 ------------------------------------------------------------------------------------------------------------


INPUTS, TARGETS = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def loss_of(model):
    # Outputs that count alike would share their eigenvalues.
    return ((model(INPUTS) - TARGETS[:, :2]).square() * torch.tensor([1.0, 3.0])).mean()


def exact_hessian(model, names):
    """By torch's own function, of some of the parameters."""
    values = tuple(dict(model.named_parameters())[name].detach() for name in names)

    def loss(*changed):
        return loss_of(lambda inputs: functional_call(model, dict(zip(names, changed, strict=True)), (inputs,)))

    blocks = torch.autograd.functional.hessian(loss, values)
    sizes = [value.numel() for value in values]
    rows = [
        torch.cat([block.reshape(size, -1) for block in of_row], dim=1)
        for size, of_row in zip(sizes, blocks, strict=True)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize(("block", "names"), [("0", ["0.weight", "0.bias"]), ("2.weight", ["2.weight"])])
def test_eigenpairs_are_those_of_the_exact_hessian(tiny, block, names):
    name, parameters = block_of(tiny, block)
    assert name == block
    hessian = exact_hessian(tiny, names)
    product = hessian_product(loss_of(tiny), parameters)
    probe = torch.randn(len(hessian), dtype=torch.float64)
    torch.testing.assert_close(product(probe), hessian @ probe)

    values, vectors = torch.linalg.eigh(hessian)
    order = values.abs().argsort(descending=True)
    pairs = leading_eigenpairs(product, probe, tolerance=1e-8, iterations=20_000)
    for pair, index in zip(pairs, order[:2].tolist(), strict=True):
        assert pair.value == pytest.approx(values[index].item(), rel=1e-6)
        assert abs((pair.vector @ vectors[:, index]).item()) == pytest.approx(1, abs=1e-6)
        assert pair.residual <= 1e-8


@pytest.mark.parametrize("diagonal", [(3.0, -2.999, 1.0), (2.999, -3.0, 1.0)])
def test_eigenvalues_of_opposite_signs_are_parted(diagonal):
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    pairs = leading_eigenpairs(matrix.mv, matrix[0], tolerance=1e-6, generator=generator)
    assert [pair.value for pair in pairs] == pytest.approx(sorted(diagonal, key=abs)[:0:-1], rel=1e-6)
    assert all(pair.residual <= 1e-6 for pair in pairs)


def test_a_linear_loss_curves_nowhere():
    weight = torch.ones(3, requires_grad=True)
    pairs = leading_eigenpairs(hessian_product(weight.sum(), [weight]), weight.detach())
    assert [pair.value for pair in pairs] == [0, 0]


def test_surface_is_the_loss_around_the_weights(tiny):
    before = {name: value.clone() for name, value in tiny.state_dict().items()}
    surface = measure_surface(tiny, lambda: loss_of(tiny), "2.weight")
    assert surface.parameters == 6
    losses = torch.tensor(surface.losses)
    assert losses.shape == (21, 21)
    assert surface.losses[10][10] == pytest.approx(loss_of(tiny).item(), rel=1e-6)
    torch.testing.assert_close(dict(tiny.state_dict()), before)
    # The loss is quadratic in the last layer: second differences along either axis are the eigenvalues.
    step = surface.offsets[1] - surface.offsets[0]
    assert surface.offsets[20] == pytest.approx(math.sqrt(2 / surface.eigenvalues[0]))
    along = (losses[2:, 10] - 2 * losses[1:-1, 10] + losses[:-2, 10]) / step**2
    across = (losses[10, 2:] - 2 * losses[10, 1:-1] + losses[10, :-2]) / step**2
    assert along.tolist() == pytest.approx([surface.eigenvalues[0]] * 19, rel=2e-2)
    assert across.tolist() == pytest.approx([surface.eigenvalues[1]] * 19, rel=2e-2)


def test_block_of_a_model(tiny):
    assert block_of(tiny, None)[0] == "0.weight"
    with pytest.raises(UnknownBlockError, match=r"no block 7; there are 0\.weight, 0\.bias"):
        block_of(tiny, "7")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    parse_train(["digits", "--optimizer", "sgd", "--epochs", "1", "--output", str(folder)]).run()
    (weights,) = folder.rglob("weights.pt")
    return weights


@pytest.mark.usefixtures("no_landscapes")
def test_surface_of_a_run(trained, tmp_path):
    paper = Paper(surface=trained, output=tmp_path)
    paper.run()
    numbers = json.loads((tmp_path / "figure2.json").read_text())
    assert numbers["eigenvalues"][0] > 0
    assert "handwritten digits" in numbers["shows"]
    assert (tmp_path / "figure2.png").read_bytes().startswith(b"\x89PNG")
    replace(paper, surface=None).run()
    assert "![Figure 2" in (tmp_path / "paper.md").read_text()


def test_surface_of_a_run_that_is_under_way(tmp_path):
    parse_train(["digits", "--epochs", "2", "--stop-after-epochs", "1", "--output", str(tmp_path / "runs")]).run()
    (checkpoint,) = (tmp_path / "runs").rglob("checkpoint.pt")
    Paper(surface=checkpoint, output=tmp_path).run()
    assert "handwritten digits" in json.loads((tmp_path / "figure2.json").read_text())["shows"]


def test_surface_without_its_run_asks_for_the_task(trained, tmp_path):
    alone = tmp_path / "weights.pt"
    alone.write_bytes(trained.read_bytes())
    with pytest.raises(SystemExit, match="give --task"):
        Paper(surface=alone, output=tmp_path).run()
    with pytest.raises(SystemExit, match="there is no block nowhere"):
        Paper(surface=alone, task="digits", block="nowhere", output=tmp_path).run()
    with pytest.raises(SystemExit, match="is of the task digits, not cifar10-resnet20"):
        Paper(surface=trained, task="cifar10-resnet20", output=tmp_path).run()
    with pytest.raises(SystemExit, match="there is no task nothing"):
        Paper(surface=alone, task="nothing", output=tmp_path).run()
    with pytest.raises(SystemExit, match="cannot be read"):
        Paper(surface=tmp_path / "absent.pt", task="digits", output=tmp_path).run()
