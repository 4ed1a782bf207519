"""`adahessian train`: one run per seed."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from functools import partial
from inspect import cleandoc
from itertools import takewhile
from linecache import getlines
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tyro

from adahessian.lab.configs import PRESETS, find_preset
from adahessian.lab.configs.checks import Options
from adahessian.lab.configs.optimizers import OPTIMIZERS
from adahessian.lab.configs.run import Run, RunConfig, Session, difference, label
from adahessian.lab.errors import ConfigError, DataError, LabError, RunExistsError, StoppedError
from adahessian.lab.results.run_file import RunFiles, RunResult, read_run

if TYPE_CHECKING:
    import torch
    from rich.console import Console


class Train(Options):
    """Train a task. Options default to the preset of the task and the optimizer."""

    seeds: tuple[int, ...] = (1,)  # Seeds, one run each.
    name: str | None = None  # Name of the runs. None uses the optimizer and the changed options.
    config: RunConfig
    session: Session


def main(argv: Sequence[str]) -> None:
    """Train with every seed. A run that stops as planned does not prevent the next one."""
    runs, session = parse_runs(argv, "adahessian train")
    for run in runs:
        try:
            execute(run, session)
        except StoppedError as stopped:
            if not stopped.planned:
                raise


def parse_runs(argv: Sequence[str], prog: str) -> tuple[list[Run], Session]:
    """Return one run per seed, and the session, from ``[TASK, OPTIMIZER, --options...]``."""
    names = [*takewhile(lambda word: not word.startswith("-"), argv[:2])]
    usage = f"Usage: {prog} TASK [OPTIMIZER] [--options]\n\nTasks: {', '.join(PRESETS)}.\n"
    usage += f"Optimizers: {', '.join(OPTIMIZERS)}.\n\n{prog} TASK OPTIMIZER --help lists the options."
    if not names and argv and argv[0] in ("-h", "--help"):
        print(usage)
        raise SystemExit
    if not names:
        raise ConfigError(f"The first argument must be a task.\n{usage}")
    preset, optimizer = find_preset(names[0]), names[1] if len(names) > 1 else "adahessian-kron"
    default = Train(config=preset.config(optimizer), session=Session())
    _add_help(default)
    parsed: Train = tyro.cli(
        Train,
        description=Train.__doc__,
        args=argv[len(names) :],
        default=default,
        prog=f"{prog} {preset.name} {optimizer}",
        config=(tyro.conf.AvoidSubcommands, tyro.conf.OmitArgPrefixes),
    )
    if not parsed.seeds or min(parsed.seeds) < 0:
        raise ConfigError("--seeds is empty or negative. Pass one or more non-negative integers.")
    if parsed.name is not None and Path(parsed.name).name != parsed.name:
        raise ConfigError(f"--name {parsed.name} contains a folder. Pass the folder as --output.")
    name = parsed.name or label(optimizer, parsed.config, default.config)
    run = partial(Run, task=preset.name, optimizer=optimizer, config=parsed.config, label=name)
    return [run(seed=seed) for seed in parsed.seeds], parsed.session


def execute(
    run: Run, session: Session, *, console: Console | None = None, selection: dict[str, Any] | None = None
) -> RunResult:
    """Train a run to its end, or resume it. With ``session.resume``, return the result of a finished run.

    ``selection`` holds the trials and the metric that chose the configuration, if a sweep did. Only rank 0 prints.
    """
    from rich.console import Console

    from adahessian.lab.training.distributed import process_group, rank
    from adahessian.lab.training.interrupts import Interrupts
    from adahessian.lab.training.progress import Progress, shown
    from adahessian.lab.training.steps import fallbacks
    from adahessian.lab.training.trainer import Trainer

    is_writer = rank() == 0
    console = (console or Console()) if is_writer else Console(quiet=True)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    device = _device(session.device)
    files = RunFiles(output=session.output, task=run.task, label=run.label, seed=run.seed)
    if finished := _finished(run, session, files, device):
        say(f"{files.result} is already finished. Skipped.")
        return finished
    try:
        with (
            _own_folder(files.folder) if is_writer else nullcontext(),
            Progress(run, files, console) as progress,
            Interrupts(progress.stopping) as interrupts,
            process_group(device) as rank_device,
            fallbacks() as found,
        ):
            trainer = Trainer(
                run,
                session,
                device=rank_device,
                progress=progress,
                stop_requested=lambda: interrupts.requested,
                fallbacks=found,
                selection=selection,
            )
            result = trainer.train()
    except StoppedError as stopped:
        instead = " instead of --overwrite" * session.overwrite
        say(f"{stopped} Run the same command with --resume{instead} to continue.")
        raise
    except DataError as error:
        hint = f"`adahessian fetch {run.task}` downloads the data or explains how to get it."
        raise DataError(f"{error}\n{hint}") from error
    except OSError as error:
        where = error.filename or files.folder
        raise LabError(
            f"{where} cannot be read or written: {error.strerror or error}. Free some space or choose another "
            "--output, then continue with --resume. Files written earlier are intact."
        ) from error
    say(f"{shown(run.config.task.metric, result.final) or result.status}: {files.result}")
    return result


def program() -> list[str]:
    """Return the words that started the command: a user's own file with tasks, or ``adahessian``."""
    script = Path(sys.argv[0])
    return ["python", script.name] if script.suffix == ".py" and script.name != "__main__.py" else ["adahessian"]


def train_line(run: Run) -> str:
    """Return the command that trains a run: options that differ from the preset's, without seed and session."""
    preset = find_preset(run.task).config(run.optimizer)
    words = [*program(), "train", run.task, run.optimizer, *typed(difference(run.config, preset), unset=True)]
    if run.label != label(run.optimizer, run.config, preset):
        words += ["--name", run.label]
    return shlex.join(words)


def typed(options: Mapping[str, Any], *, unset: bool = False) -> list[str]:
    """Return options as they are typed. Those that are None or empty are left out, except with ``unset``."""
    words: list[str] = []
    for name, value in options.items():
        option, values = name.replace("_", "-"), value if isinstance(value, tuple) else (value,)
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif unset or (values and value is not None):
            words += [f"--{option}", *map(str, values)]
    return words


def _add_help(options: Any) -> None:
    """Pass comments and docstrings of options to tyro as help, because its own search parses files repeatedly."""
    comments: dict[str, str] = {}
    for cls in reversed(type(options).__mro__):
        source = "".join(getlines(getattr(sys.modules[cls.__module__], "__file__", "")))
        body = re.split(r"\n\S", source.partition(f"\nclass {cls.__name__}(")[2], maxsplit=1)[0]
        comments |= re.findall(r"^    (\w+): .*  # (.+)", body, re.MULTILINE)
    for option in fields(options):
        text, value = comments.get(option.name), getattr(options, option.name)
        if isinstance(value, Options):
            _add_help(value)
            text = cleandoc(value.__doc__ or "")
        if text is not None:
            option.metadata = MappingProxyType({"help": text})


def _finished(run: Run, session: Session, files: RunFiles, device: torch.device) -> RunResult | None:
    """Return the result of a finished run that ``--resume`` skips."""
    from adahessian.lab.training.checkpoint import changed, effective_precision, identity
    from adahessian.lab.training.distributed import world_size

    existing = next((path for path in (files.result, files.checkpoint) if path.exists()), None)
    if existing is None or session.overwrite:
        return None
    if not session.resume:
        done = "skip" if existing == files.result else "continue"
        raise RunExistsError(
            f"{existing} exists. Pass --resume to {done} it, --overwrite to start over, or another --name or --output."
        )
    if existing == files.checkpoint:
        return None
    result = read_run(files.result)
    before = identity(result, result.conditions["precision"], result.conditions["processes"])
    if names := changed(before, identity(run, effective_precision(session, device), world_size())):
        raise RunExistsError(
            f"{files.result} is a run with different values of {names}. Choose another --name or --output, or pass "
            "--overwrite to start over."
        )
    files.checkpoint.unlink(missing_ok=True)  # a run that was killed right after its end leaves it
    return result


def _device(name: str | None) -> torch.device:
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type != "cuda":  # on a GPU, every rank would allocate memory on the first one
            torch.zeros((), device=device).item()
        elif not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no GPU")
    except (RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ConfigError(
            f"--device {name} cannot be used: {reason}. Pass --device cpu to train without it."
        ) from error
    return device


@contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """Lock the folder of a run, and remove it if the run could not start."""
    from adahessian.lab.training.checkpoint import locked

    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        try:
            yield
        finally:
            with suppress(OSError):
                if {path.name for path in folder.iterdir()} <= {".lock"}:
                    shutil.rmtree(folder)
                    folder.parent.rmdir()
