import math
import re
from pathlib import Path

import pytest
from made_up_runs import make_run, rows_of, write
from scipy.stats import ttest_ind

from adahessian.lab.commands import report
from adahessian.lab.errors import RunFileError
from adahessian.lab.results import frames, tables

ROOT = Path(__file__).parents[2]


def cells(table, key, column):
    return dict(zip(table[key], table[column], strict=True))


# Tables ---------------------------------------------------------------------------------------------------------------


def test_a_section_per_task_and_length(tmp_path):
    runs = rows_of(
        tmp_path,
        make_run(task="digits"),
        make_run(epochs=16),
        make_run(),
        make_run(holdout=10, final={"test_accuracy": 80.0}),
        make_run("adamw", task="gpt-novels", value=3.0),
    )
    first, *images, last = [title for title, _ in tables.sections(runs)]
    assert first.endswith("digits, 10 epochs")
    lengths = ("16 epochs", "160 epochs", "160 epochs, trials with held-out data")
    assert sorted(images) == [f"ResNet20 on CIFAR-10, {length}" for length in lengths]
    assert last.endswith("2200 steps")


def test_table_of_a_section(tmp_path):
    runs = rows_of(
        tmp_path,
        make_run("adamw", lr=0.5, epochs=16, value=math.nan),
        make_run("adamw", epochs=16, value=91.0, final={"test_accuracy": 91.0, "test_loss": 0.3}),
        *(make_run(seed=seed, epochs=16, value=90.0 + seed) for seed in (1, 2)),
        make_run(seed=3, epochs=16, final={"test_accuracy": 93.0, "test_loss": 0.2}),
    )
    table = tables.task_table(runs)
    assert table.optimizer.tolist() == ["sgd", "adamw", "adamw"]
    assert table.options.tolist() == ["", "", "lr=0.5"]
    assert table["test accuracy, %"].tolist() == ["92.00 ± 1.00", "91.00", ""]
    assert table.seeds.tolist() == ["3", "1", "0"]
    assert table.diverged.tolist() == ["0", "0", "1"]
    assert table["test loss"].tolist() == ["", "0.300", ""]
    assert table["ms per step"].tolist() == ["4.00"] * 3


def test_numbers_keep_two_digits_if_they_are_very_small():
    assert [tables.number(*each) for each in ((91.256, 2), (1.23e-6, 5), (0.0, 2))] == ["91.26", "1.2e-06", "0.00"]
    assert tables.spread(4.1, 0.0002, 3) == "4.100 ± 0.000"
    assert tables.spread(1e-6, 2e-7, 5) == "1e-06 ± 2e-07"
    assert tables.spread(math.nan, math.nan, 2) == ""


def test_comparison_of_preset_chosen_and_tuned_settings(tmp_path):
    tuned = {"trials": 5, "selected_on": "valid_loss"}
    runs = rows_of(
        tmp_path,
        make_run("adamw", value=91.0),
        make_run("sgd", value=92.0, lr=0.7),
        make_run("muon", value=50.0, lr=0.5),
        make_run("muon", value=93.0, lr=0.3, selection=tuned),
        make_run("adamw", value=91.5, lr=0.2, selection=tuned),
        make_run("adamw", task="glue-rte", value=math.nan, model="other"),
    )
    choices = {"cifar10-resnet20": {"sgd": "sgd lr=0.7"}, "glue-rte": {"shared": "model=other"}}
    preset, tuned, rte = tables.comparison(runs, choices).to_dict("records")
    assert (preset["SGD"], preset["AdamW"], preset["Muon"]) == ("92.00 (1)*", "91.00 (1)", "")
    assert (tuned["SGD"], tuned["AdamW"], tuned["Muon"]) == ("", "91.50 (1)", "93.00 (1)")
    assert tuned["task"].endswith("tuned")
    assert rte["AdamW"] == "diverged"
    assert list(preset) == ["task", "SGD", "AdamW", "Muon"]


def test_differences_need_several_seeds(tmp_path):
    values = {"adamw": (91.0, 91.1), "sgd": (92.0, 92.1), "adam": (90.0,)}
    runs = rows_of(tmp_path, *(make_run(name, i, x) for name, of in values.items() for i, x in enumerate(of)))
    (row,) = tables.differences(runs, {}).to_dict("records")
    assert "Adam" not in row
    welch = ttest_ind(values["sgd"], values["adamw"], equal_var=False).confidence_interval()
    assert row["SGD"] == "+1.00 [{:+.2f}, {:+.2f}]".format(*welch)
    sgd, adamw, adam = (runs[runs.optimizer == name] for name in ("sgd", "adamw", "adam"))
    assert tables.verdict(sgd, adamw).endswith("], better")
    assert tables.verdict(adamw, sgd).endswith("], worse")
    assert tables.verdict(sgd, sgd).endswith("], no significant difference")
    assert tables.verdict(adam, sgd) == "-2.05, too few runs"
    losses = rows_of(tmp_path / "b", *(make_run("muon", i, 2 + i / 100, task="gpt-novels") for i in (1, 2)))
    assert tables.verdict(losses, losses.assign(value=losses.value + 1)).endswith("], better")


def test_races_and_learning_rates(tmp_path):
    task, runs = "gpt-novels", []
    for name, loss in (("adamw", 3.0), ("muon", 2.9)):
        runs += [make_run(name, 1, loss, task=task), make_run(name, 1, loss + 0.2, task=task, steps=1100)]
        runs += [make_run(name, 1, loss + 0.1, task=task, lr=lr) for lr in (5e-4, 2e-3)]
    rows = rows_of(tmp_path, *runs)
    race = tables.race_table(rows)
    assert cells(race, "setting", "1,100 steps") == {"AdamW": "3.200 (1)", "Muon": "3.100 (1)"}
    assert cells(race, "setting", "budget for the result of AdamW") == {"AdamW": "1.00", "Muon": "1.00"}
    rates = tables.lr_table(rows)
    assert list(rates)[1:] == ["x 0.5", "x 1", "x 2"]
    assert cells(rates, "setting", "x 2") == {"AdamW": "3.100 (1)", "Muon": "3.000 (1)"}


# The page and RESULTS.md ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    runs = [make_run(name, seed, 90.0 + seed) for name in ("sgd", "adamw") for seed in (1, 2)]
    write(tmp_path / "runs", *runs, make_run("adamw", lr=0.02, value=math.nan), make_run("sgd", value=80.0, epochs=16))
    return tmp_path / "runs"


def test_the_page_needs_no_other_file(folder, tmp_path, capsys):
    output = tmp_path / "page" / "index.html"
    report.main([str(folder), "--output", str(output)])
    text = output.read_text()
    assert text.count("<svg") == text.count("</svg>") >= 4
    assert {link[0] for link in re.findall(r'(?:src|href)="([^"]*)"', text)} == {"#"}
    assert "91.50 ± 0.71" in text
    assert "91.50 ± 0.71" in capsys.readouterr().out
    before = output.read_bytes()
    report.main([str(folder), "--output", str(output)])
    assert output.read_bytes() == before


def test_markdown_is_rendered_and_checked(folder, tmp_path):
    template, output = folder / "RESULTS.md.j2", tmp_path / "RESULTS.md"
    template.write_text('SGD: {{ result("cifar10-resnet20", "sgd") }}\n{{ figure("seeds", "cifar10-resnet20") }}\n')
    arguments = [str(folder), "--markdown", str(output)]
    with pytest.raises(RunFileError, match=r"RESULTS\.md"):
        report.main([*arguments, "--check"])
    report.main(arguments)
    first, second = output.read_text().splitlines()
    assert first == "SGD: 91.50 ± 0.71 (2)"
    (figure,) = re.findall(r"\((.*\.png)\)", second)
    assert (output.parent / figure).read_bytes().startswith(b"\x89PNG")
    report.main([*arguments, "--check"])
    write(folder, make_run(seed=3, value=99.0))
    with pytest.raises(RunFileError, match=r"RESULTS\.md"):
        report.main([*arguments, "--check"])


@pytest.mark.parametrize("text", ['{{ result("cifar10-resnet20", "adam") }}', "{{ nothing }}", "{% if %}"])
def test_templates_with_errors_are_rejected(text, folder, tmp_path):
    (folder / "RESULTS.md.j2").write_text(text)
    with pytest.raises(RunFileError, match="template"):
        report.main([str(folder), "--markdown", str(tmp_path / "RESULTS.md")])
    assert not (tmp_path / "RESULTS.md").exists()


def test_missing_runs_are_printed_as_lines_for_the_queue(folder, tmp_path, capsys):
    report.main([str(folder), "--missing"])
    assert "cifar10-resnet20 sgd --seeds 3 4 5\n" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    report.main([str(tmp_path / "empty"), "--missing"])
    assert "cifar10-resnet20 sgd --seeds 1 2 3 4 5\n" in capsys.readouterr().out
    with pytest.raises(RunFileError, match="empty"):
        report.main([str(tmp_path / "empty")])


def test_results_of_this_repository_are_rendered(tmp_path):
    output = ROOT / "RESULTS.md"
    report.main([str(ROOT / "results"), "--markdown", str(output), "--check"])
    assert len(output.read_text().splitlines()) <= 200
    messages = []
    assert len(frames.runs([ROOT / "results"], messages.append)) == len([*ROOT.glob("results/*/*.json")])
    assert messages == []
