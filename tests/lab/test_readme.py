"""Every command of the README's section on the laboratory runs, on tiny data in the real format."""

import re
import shlex
from pathlib import Path

from runs import typed, write_data
from small_tasks import SMALL

from adahessian.lab import command

README = Path(__file__).parents[2] / "README.md"
# Options that make a command short, and what it prints.
SHORTER = {
    "tasks": ([], "cifar10-resnet20"),
    "fetch": ([], "exists already"),
    "train": (typed(Path(), epochs=1, **SMALL["cifar10-resnet20"])[4:], "test accuracy"),
    "sweep": (["--epochs", "1", "--trials", "2", "--device", "cpu"], "adahessian train digits adahessian-kron"),
    "report": ([], "adahessian-kron"),
    "bench": (["--workloads", "digits", "--optimizers", "adamw", "--modes", "eager", "--rounds", "1"], "ms/step"),
}


def test_commands_of_the_readme(tmp_path, monkeypatch, capsys):
    section = README.read_text().partition("## The laboratory")[2].partition("\n## ")[0]
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^adahessian .*$", section, re.MULTILINE)]
    assert [line[1] for line in lines] == list(SHORTER)
    write_data("cifar10-resnet20", tmp_path)
    monkeypatch.chdir(tmp_path)
    for _, name, *words in lines:
        options, expected = SHORTER[name]
        command.main([name, *words, *options])
        assert expected in capsys.readouterr().out, name
