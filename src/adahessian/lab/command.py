"""The ``adahessian`` command."""

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import adahessian
from adahessian.lab.errors import LabError, StoppedError

COMMANDS = {
    "tasks": "List tasks, or show the settings of one.",
    "fetch": "Download the data of a task.",
    "train": "Train a task with an optimizer.",
    "sweep": "Tune optimizers with the same number of trials each.",
    "queue": "Train a list of runs within a time limit.",
    "report": "Render tables and figures of runs.",
    "figure": "Draw one figure.",
    "bench": "Measure step time and memory of optimizers.",
    "demo": "Train two small tasks with several optimizers, in a minute.",
}
"""Help of each subcommand. The modules of the same names in `commands` are imported on use."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand that the arguments name."""
    # Messages of the library and of the laboratory go to standard error.
    logger, handler = logging.getLogger("adahessian"), _ToStandardError()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        _run(sys.argv[1:] if argv is None else argv)
    except StoppedError as stopped:
        sys.exit(0 if stopped.planned else 130)
    except LabError as error:
        sys.exit(f"adahessian: {error}")
    except BrokenPipeError:
        # The reader has closed the pipe. Python must not fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where, why = error.filename or "A file", error.strerror or error
        sys.exit(f"adahessian: {where} cannot be read or written: {why}. Pass another path, or free some space.")
    except KeyboardInterrupt:
        print("adahessian: Interrupted.", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package in ("", "adahessian"):
            raise
        extra = "peers" if package == "pytorch_optimizer" else "lab"
        sys.exit(f'adahessian: {package} is missing. Run: pip install "adahessian[{extra}]"')
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _run(words: Sequence[str]) -> None:
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print("Usage: adahessian COMMAND ...\n\nExperiments with the AdaHessian optimizers.\n")
        print("\n".join(f"  {command:<8}{text}" for command, text in COMMANDS.items()))
        print("\nadahessian COMMAND --help lists the options of a command.")
    elif name == "--version":
        from importlib.metadata import version

        print(f"adahessian {adahessian.__version__}, torch {version('torch')}")
    elif name in COMMANDS:
        import_module(f"adahessian.lab.commands.{name}").main(words[1:])
    else:
        from adahessian.lab.configs.presets import near

        raise LabError(f"There is no command {near(name, COMMANDS)}")


class _ToStandardError(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Looked up each time, because a live display replaces it for its duration.
        print(f"adahessian: {record.getMessage()}", file=sys.stderr)


if __name__ == "__main__":
    main()
