"""The `adahessian` command: what it imports, and what it prints about errors."""

import logging
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
from runs import typed

from adahessian.lab import command
from adahessian.lab.commands.train import parse_runs, train_line
from adahessian.lab.configs import PRESETS
from adahessian.lab.errors import StoppedError

HEAVY = {"torch", "pandas", "matplotlib", "sklearn", "scipy", "transformers"}


def fail(capsys, *words):
    """Return what the command prints about its error."""
    with pytest.raises(SystemExit) as stopped:
        command.main(words)
    assert stopped.value.code not in (0, None)
    return f"{capsys.readouterr().err}{stopped.value.code}"


@pytest.mark.parametrize("words", ["--help", "--version", "tasks", "tasks digits", "train digits adahessian --help"])
def test_help_imports_little(words):
    arguments = [sys.executable, "-X", "importtime", "-m", "adahessian", *words.split()]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, flags=re.MULTILINE))
    assert "adahessian.lab.errors" in imported
    assert not HEAVY & imported
    assert done.stdout


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as done:
        command.main([name, "--help"])
    assert not done.value.code
    command.main([])
    assert re.search(rf"adahessian {name}.*  {name} ", capsys.readouterr().out, re.DOTALL)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("trian digits", "train"),
        ("tasks mnist", "mnist"),
        ("train", "cifar10-resnet20"),
        ("train --epochs 2", "digits"),
        ("train cifar10-resnet-20", "cifar10-resnet20"),
        ("train digits sdg", "sgd"),
        ("train criteo-dlrm adam", "adagrad"),
        ("train digits sgd --lrr 3", "--lr"),
        ("train digits sgd --num-probes 4", "--num-probes"),
        ("train digits --lr -1", "--lr -1.0"),
        ("train digits --epochs 0", "--epochs 0"),
        ("train digits --resume --overwrite", "--overwrite"),
        ("train digits --stop-after-steps 0", "--stop-after-steps 0"),
        ("train digits --seeds -1", "--seeds"),
        ("train digits --name ../x", "--name ../x"),
        ("train digits --device teapot", "--device teapot"),
        ("train digits --device meta", "--device meta"),
        ("train cifar10-resnet20 --data-dir nowhere --device cpu", "adahessian fetch cifar10-resnet20"),
    ],
)
def test_errors_name_the_argument_and_the_remedy(words, named, capsys, tmp_path):
    output = ["--output", str(tmp_path / "runs")] if words.startswith("train ") else []
    printed = fail(capsys, *words.split(), *output)
    assert named in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(("module", "extra"), [("tyro", "lab"), ("rich", "lab"), ("pytorch_optimizer", "peers")])
def test_a_missing_package_is_named_with_its_extra(module, extra, monkeypatch, capsys):
    monkeypatch.setattr(command, "import_module", Mock(side_effect=ModuleNotFoundError(name=module)))
    printed = fail(capsys, "train")
    assert module in printed
    assert f'pip install "adahessian[{extra}]"' in printed
    # A missing module of the package is a bug.
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "adahessian.lab.commands.tasks", None)
    with pytest.raises(ModuleNotFoundError, match="tasks"):
        command.main(["tasks"])


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (StoppedError("", planned=True), 0), (StoppedError("", planned=False), 130)],
)
def test_interrupts_are_not_tracebacks(error, status, monkeypatch):
    monkeypatch.setattr(command, "_run", Mock(side_effect=error))
    with pytest.raises(SystemExit) as stopped:
        command.main(["train"])
    assert stopped.value.code == status


def test_messages_of_the_library_go_to_standard_error(monkeypatch, capsys):
    monkeypatch.setattr(command, "_run", lambda words: logging.getLogger("adahessian").info("compiling"))
    command.main(["train"])
    logging.getLogger("adahessian").info("after the command")
    assert capsys.readouterr().err == "adahessian: compiling\n"


# Runs from the command line ---------------------------------------------------------------------------------------


def test_options_become_runs(tmp_path):
    words = ["digits", "sgd", "--lr", "0.2", "--seeds", "3", "1", "--betas", "0.8", "0.9"]
    with pytest.raises(SystemExit):
        parse_runs(words, "adahessian train")  # SGD has no betas
    runs, session = parse_runs([*words[:-3], *typed(tmp_path, holdout=300, exclusive=True)], "adahessian train")
    assert [run.seed for run in runs] == [3, 1]
    assert {run.label for run in runs} == {"sgd holdout=300 lr=0.2"}
    assert (runs[0].config.optimizer.lr, runs[0].config.task.holdout, session.exclusive) == (0.2, 300, True)
    (default,), _ = parse_runs(["digits"], "adahessian train")
    assert (default.optimizer, default.label) == ("adahessian-kron", "adahessian-kron")


@pytest.mark.parametrize("task", PRESETS)
def test_train_lines_are_read_back(task):
    for optimizer in PRESETS[task].optimizers:
        words = [
            task,
            optimizer,
            "--lr",
            "0.025",
            "--schedule",
            "steps",
            "--decay-epochs",
            "3",
            "5",
            "--name",
            "my run",
        ]
        words += [] if optimizer == "lbfgs" else ["--no-decay-bias-and-norm"]
        (run,), _ = parse_runs(words, "adahessian train")
        line = train_line(run)
        assert line.endswith("--name 'my run'")
        (again,), _ = parse_runs([*line.split()[2:-3], "--name", "my run"], "adahessian train")
        assert again == run
        (default,), _ = parse_runs([task, optimizer], "adahessian train")
        assert train_line(default) == f"adahessian train {task} {optimizer}"


def test_seeds_that_stop_as_planned_do_not_keep_others_from_starting(tmp_path, capsys):
    options = typed(tmp_path, seeds=[1, 2], stop_after_steps=2)
    command.main(["train", "digits", "sgd", *options])
    assert capsys.readouterr().out.count("--resume") == 2
    assert len([*tmp_path.rglob("checkpoint.pt")]) == 2


def test_progress_is_printed_and_metrics_have_units(tmp_path, capsys):
    command.main(["train", "digits", "sgd", *typed(tmp_path, epochs=2)])
    first, *evaluations, last = capsys.readouterr().out.splitlines()
    assert "5,178 parameters" in first
    assert [line.split()[1] for line in evaluations] == ["20/40", "40/40"]
    assert re.fullmatch(r"test accuracy \d+\.\d\d%: .*sgd_epochs=2_seed-1\.json", last)


# Tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_task_is_described_with_settings_that_can_be_typed(name, capsys):
    command.main(["tasks", name])
    printed = capsys.readouterr().out
    preset = PRESETS[name]
    assert preset.data in printed
    (common,) = re.findall(r"^All optimizers: (.*)$", printed, flags=re.MULTILINE)
    for optimizer in preset.optimizers:
        (own,) = re.findall(rf"^{optimizer} {{2,}}(.*)$", printed, flags=re.MULTILINE)
        (run,), _ = parse_runs([name, optimizer, *common.split(), *own.split()], "adahessian train")
        assert run.config == preset.config(optimizer)


def test_all_tasks_are_listed_and_the_papers_numbers_shown(capsys):
    command.main(["tasks"])
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[: len(PRESETS)]] == [*PRESETS]
    command.main(["tasks", "cifar10-resnet20"])
    assert "Table 2, sgd: test_accuracy 92.08 ± 0.08" in capsys.readouterr().out
