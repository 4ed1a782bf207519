"""The ``adahessian`` command."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Protocol

import torch

import adahessian

_EXTRA_PACKAGES = frozenset(
    {
        "PIL",
        "matplotlib",
        "numpy",
        "rich",
        "sacrebleu",
        "safetensors",
        "scipy",
        "sklearn",
        "tokenizers",
        "torchmetrics",
        "transformers",
        "tyro",
    }
)


# By their names: the module and the class of each, which are imported on use.
_COMMANDS = {
    "demo": ("adahessian.lab.demo", "Demo"),
    "tasks": ("adahessian.lab.task_list", "Tasks"),
    "train": ("adahessian.lab.train", "Train"),
    "study": ("adahessian.lab.study", "Study"),
    "queue": ("adahessian.lab.queue", "Queue"),
    "report": ("adahessian.lab.report.command", "Report"),
    "paper": ("adahessian.lab.paper.command", "Paper"),
    "fetch": ("adahessian.lab.fetch", "Fetch"),
    "bench": ("adahessian.lab.bench.command", "Bench"),
}


class Command(Protocol):
    """A subcommand: its settings are the fields of a dataclass, its help their documentation."""

    def run(self) -> None:
        """Do what the subcommand is for."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the subcommand that the arguments name.

    Args:
        arguments: Arguments after the command's name; those of the process if None.
    """
    try:
        # Within the try, as it imports for seconds.
        command = _parse(arguments)
        with _messages_shown():
            command.run()
    except BrokenPipeError:
        # Whoever reads has seen enough. What Python would still write at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("adahessian: stopped", file=sys.stderr)
        sys.exit(130)


@contextmanager
def _messages_shown() -> Iterator[None]:
    """Print the messages of the library and of the tasks to standard error."""
    logger = logging.getLogger("adahessian")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("adahessian: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _parse(arguments: Sequence[str] | None) -> Command:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["--version"]:
        print(f"adahessian {adahessian.__version__}, torch {torch.__version__}")
        sys.exit(0)
    try:
        # Imported on use, as it comes with the extra, which the library itself does without.
        import tyro

        if arguments[:1] in (["train"], ["study"]):
            # Their defaults depend on the task and on the optimizer.
            from adahessian.lab.study import parse_study
            from adahessian.lab.train import parse_train

            return (parse_train if arguments[0] == "train" else parse_study)(arguments[1:])

        # Of several that would take seconds to import only the one that is asked for.
        names = [name for name in _COMMANDS if arguments[:1] == [name]]
        commands = {name: _imported(*_COMMANDS[name]) for name in names or _COMMANDS}
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in _EXTRA_PACKAGES:
            raise
        print(f'adahessian: the command needs {package}: pip install "adahessian[lab]"', file=sys.stderr)
        sys.exit(1)

    if names:
        return tyro.cli(commands[names[0]], prog=f"adahessian {names[0]}", args=arguments[1:])
    parsed: Command = tyro.extras.subcommand_cli_from_dict(
        commands, prog="adahessian", description="Experiments with the AdaHessian optimizer.", args=arguments
    )
    return parsed


def _imported(module: str, name: str) -> Callable[..., Command]:
    command: Callable[..., Command] = getattr(import_module(module), name)
    return command


if __name__ == "__main__":
    main()
