"""``adahessian train``: one task, one optimizer, one seed or several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Generic

import torch
import tyro
from rich.console import Console

from adahessian.lab.checkpoints import CheckpointError
from adahessian.lab.data.errors import DataError
from adahessian.lab.data.sources import source_of
from adahessian.lab.files import TakenError, taken
from adahessian.lab.optimizers import UnsuitableOptimizerError
from adahessian.lab.processes import is_first
from adahessian.lab.runs import NotARunError, Result, RunFiles, differences, read_result
from adahessian.lab.settings import OF_ADAHESSIAN, OPTIMIZER_NAMES, OptimizerName, SettingsError, SettingsT
from adahessian.lab.tasks.registry import EXPERIMENTS, UnknownTaskError, experiment_named
from adahessian.lab.tasks.task import Experiment
from adahessian.lab.training import Plan, Precision, StoppedError, train
from adahessian.lab.watching import LiveWatcher, shown

DEFAULT_TASK = "digits"
DEFAULT_OPTIMIZER: OptimizerName = "adahessian"


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where and how runs are computed. None of it changes what they are."""

    data_dir: Path = Path("data")
    """Folder with the data, in its owner's format."""

    output: Path = Path("runs")
    """Folder for runs: a JSON file for each that is finished, and beside it a folder with its log and weights."""

    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    """Where to train."""

    precision: Precision = "tf32"
    """float32 keeps every product exact, tf32 lets a GPU round those of matrices (a CPU keeps them exact), bfloat16 is
    autocast."""

    compile: bool = field(default_factory=torch.cuda.is_available)
    """Compile the derivatives and, on a GPU, replay them as CUDA graphs."""

    shared: bool = False
    """Say that other programs use the device meanwhile. Reports leave out the times of such runs."""

    resume: bool = False
    """Continue runs that were interrupted, and pass over finished ones.
    Uncompiled on a CPU, the end is the same bit by bit as if nothing had happened."""

    overwrite: bool = False
    """Begin anew where there is a run of that name already."""

    checkpoint_minutes: float = 10.0
    """Minutes between two checkpoints within an epoch. One is written after every epoch, too."""

    stop_after_epochs: int | None = None
    """Stop after so many more epochs, to go on later with --resume. The schedule stays that of the whole run."""

    stop_after_steps: int | None = None
    """The same after so many steps, such as 20 to see whether all is well and how fast it is."""

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise SettingsError("--resume goes on with what is there, and --overwrite gives it up: say one of them")
        for name in ("checkpoint_minutes", "stop_after_epochs", "stop_after_steps"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise SettingsError(f"--{name.replace('_', '-')} {value}: it must be above 0")


@dataclass(frozen=True, kw_only=True)
class Train(Generic[SettingsT]):
    """Train a task. Settings default to the paper's for the task and the optimizer, or to the economical ones."""

    task: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TASK")] = DEFAULT_TASK
    """The task, as `adahessian tasks` lists them."""

    optimizer: OptimizerName = DEFAULT_OPTIMIZER
    """The optimizer."""

    economical: bool = False
    """AdaHessian on a quarter of the batch at every tenth step, after an epoch of measuring at every step, with a
    steady start; on CIFAR-10 and digits, where so few examples make curvature twice as large, at twice the learning
    rate and half the weight decay, also with another --batch-fraction or --num-probes."""

    seeds: tuple[int, ...] = (1,)
    """Seeds, one run each."""

    name: str | None = None
    """What to call the runs, by default after what distinguishes them."""

    session: Annotated[Session, tyro.conf.arg(name="")] = field(default_factory=Session)

    settings: Annotated[SettingsT, tyro.conf.arg(name="")]

    def run(self) -> None:
        """Train with every seed, and say what came out."""
        console = Console(quiet=not is_first())
        for plan in self.plans():
            files = plan.files
            if self.session.resume and not files.checkpoint.exists() and not files.result.exists():
                console.print(f"nothing to resume at {files.folder}: it begins", highlight=False, soft_wrap=True)
            run_one(plan, resume=self.session.resume, console=console)

    def plans(self) -> list[Plan]:
        """A run for each seed."""
        experiment = experiment_named(self.task)
        name = self.name or experiment.label(self.optimizer, self.settings)
        return [plan_run(experiment, self.optimizer, self.settings, seed, name, self.session) for seed in self.seeds]


def plan_run(
    experiment: Experiment[Any], optimizer: OptimizerName, settings: Any, seed: int, name: str, session: Session
) -> Plan:
    """One run, as a session computes it.

    Raises:
        SystemExit: If there is no such device.
    """
    device = _device(session.device)
    return Plan(
        experiment=experiment,
        optimizer=optimizer,
        settings=settings,
        seed=seed,
        data_dir=session.data_dir,
        device=device,
        # Only GPUs have tf32.
        precision="float32" if session.precision == "tf32" and device.type != "cuda" else session.precision,
        compiled=session.compile,
        shared=session.shared,
        files=RunFiles(output=session.output, task=experiment.name, name=name, seed=seed),
        checkpoint_minutes=session.checkpoint_minutes,
        stop_after_epochs=session.stop_after_epochs,
        stop_after_steps=session.stop_after_steps,
        overwrite=session.overwrite,
    )


def run_one(plan: Plan, *, resume: bool, console: Console) -> None:
    """One run, from its start or its checkpoint, unless it was finished earlier.

    Raises:
        SystemExit: If it cannot be, with the reason; or if it was interrupted.
    """
    experiment, files = plan.experiment, plan.files
    _refuse_to_overwrite(plan, resume=resume)
    if files.result.exists() and not plan.overwrite:
        _pass_over(plan, console)
        return
    _make_folder(files)
    try:
        # Of several processes of one run the first writes.
        with taken(files.folder) if is_first() else nullcontext(), LiveWatcher(console) as watcher:
            result = train(plan, watcher)
    except TakenError as error:
        raise SystemExit(f"adahessian train: {error}: wait for it, or end it") from error
    except StoppedError as stopped:
        how = "--resume instead of --overwrite goes on with this run" if plan.overwrite else "--resume goes on"
        console.print(f"stopped {stopped}; the same command with {how}", highlight=False, soft_wrap=True)
        if stopped.as_planned:
            return
        raise SystemExit(130) from None
    except (DataError, CheckpointError, UnsuitableOptimizerError, ValueError) as error:
        with suppress(OSError):  # a run that has not begun leaves nothing behind
            files.folder.rmdir()
            files.folder.parent.rmdir()
        raise SystemExit(f"adahessian train: {error}{_how_to_get_data(experiment, error)}") from error
    except OSError as error:
        raise SystemExit(
            f"adahessian train: {_in_words(error)}. What was written before is whole: free some space, or mend what is "
            "wrong, and go on with --resume"
        ) from error
    console.print(f"{_came_to(experiment, result)}: {files.result}", highlight=False, soft_wrap=True)


def _how_to_get_data(experiment: Experiment[Any], error: Exception) -> str:
    if not isinstance(error, DataError) or source_of(experiment.name) is None:
        return ""
    return f"\nadahessian fetch {experiment.name} gets the data from its owners, or says how"


def _pass_over(plan: Plan, console: Console) -> None:
    """Say what a finished run has come to, if it is the one that is asked for."""
    try:
        result = read_result(plan.files.result)
    except NotARunError as error:
        raise SystemExit(f"adahessian train: {error}. --overwrite begins anew") from error
    if differing := differences(result.identity, plan.identity(int(os.environ.get("WORLD_SIZE", "1")))):
        raise SystemExit(
            f"adahessian train: {plan.files.result} is another run: it differs in {differing}. Choose another --name "
            "or --output, or --overwrite it"
        )
    plan.files.checkpoint.unlink(missing_ok=True)  # left behind if a run was killed right after its end
    came_to = _came_to(plan.experiment, result)
    console.print(f"{plan.files.result} is finished: {came_to}", highlight=False, soft_wrap=True)


def _make_folder(files: RunFiles) -> None:
    """Before anything is computed that could not be written."""
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"adahessian train: {_in_words(error)}. Choose another --output") from error


def _in_words(error: OSError) -> str:
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)


def _refuse_to_overwrite(plan: Plan, *, resume: bool) -> None:
    """Refuse to touch an earlier run of that name, unless it was said what to do with it."""
    files = plan.files
    if resume or plan.overwrite:
        return
    elsewhere = "--overwrite begins anew, and --name or --output put the new run elsewhere"
    if files.result.exists():
        raise SystemExit(f"adahessian train: {files.result} is finished. --resume passes over it, {elsewhere}")
    if files.checkpoint.exists():
        raise SystemExit(f"adahessian train: {files.checkpoint} is there. --resume goes on with it, {elsewhere}")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type != "cuda":  # of several processes each would take memory of the first GPU
            torch.zeros((), device=device).item()
        elif not torch.cuda.is_available():
            raise RuntimeError("it finds no GPU")
    except (RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise SystemExit(
            f"adahessian train: --device {name}: torch cannot compute on it here ({reason}); --device cpu does without"
        ) from error
    return device


def _came_to(experiment: Experiment[Any], result: Result) -> str:
    if result.diverged:
        return "diverged"
    return shown(experiment.metric, result.final)


def parse_train(arguments: Sequence[str]) -> Train[Any]:
    """Parse the arguments after ``adahessian train``.

    The task and the optimizer are looked for first: the defaults of all settings, and some of the settings themselves,
    depend on them, and ``--help`` shows them.
    """
    default = default_train(arguments)
    kind: Any = Train[type(default.settings)]  # type: ignore[misc]
    try:
        parsed: Train[Any] = tyro.cli(kind, args=list(arguments), default=default, prog="adahessian train")
    except SettingsError as error:
        raise SystemExit(f"adahessian train: {error}") from error
    if (parsed.task, parsed.optimizer) != (default.task, default.optimizer):
        raise SystemExit("adahessian train: name the task first: adahessian train TASK --optimizer NAME ...")
    if not parsed.seeds or min(parsed.seeds) < 0:
        raise SystemExit("adahessian train: --seeds takes one number or more, from 0 on")
    if parsed.name is not None and Path(parsed.name).name != parsed.name:
        raise SystemExit(f"adahessian train: --name {parsed.name}: a name has no folders in it; see --output")
    if parsed.optimizer != "adahessian":
        foreign = [n for n in OF_ADAHESSIAN if getattr(parsed.settings, n) != getattr(default.settings, n)]
        for name in ["economical"] * parsed.economical + foreign:
            raise SystemExit(
                f"adahessian train: --{name.replace('_', '-')} is a setting of AdaHessian, not of {parsed.optimizer}"
            )
    return parsed


def default_train(arguments: Sequence[str]) -> Train[Any]:
    """What the arguments leave open."""
    first = next(iter(arguments), "")
    wants_help = not {"-h", "--help"}.isdisjoint(arguments)
    if not wants_help and (not first or first.startswith("-")):
        raise SystemExit(f"adahessian train: name the task first: {', '.join(EXPERIMENTS)}")
    task = DEFAULT_TASK if not first or first.startswith("-") else first
    optimizer = option(arguments, "--optimizer", DEFAULT_OPTIMIZER)
    settings = default_settings(task, optimizer, economical=wants_economy(arguments), command="train")
    return Train(task=task, optimizer=optimizer, settings=settings)


def default_settings(task: str, optimizer: Any, *, economical: bool, command: str) -> Any:
    """The settings of a task for an optimizer.

    Raises:
        SystemExit: If there is no such task or optimizer, or the task has no settings for it.
    """
    try:
        experiment = experiment_named(task)
    except UnknownTaskError as error:
        raise SystemExit(f"adahessian {command}: {error}") from error
    if optimizer not in OPTIMIZER_NAMES:
        raise SystemExit(f"adahessian {command}: --optimizer {optimizer}: choose {', '.join(OPTIMIZER_NAMES)}")
    if optimizer not in experiment.defaults:
        able = ", ".join(experiment.defaults)
        raise SystemExit(f"adahessian {command}: {task} has no settings for {optimizer}; it has for {able}")
    return experiment.economical if economical and optimizer == "adahessian" else experiment.defaults[optimizer]


def wants_economy(arguments: Sequence[str]) -> bool:
    """Whether economical settings are asked for: the last word counts."""
    said = [argument for argument in arguments if argument in ("--economical", "--no-economical")]
    return said[-1:] == ["--economical"]


def option(arguments: Sequence[str], name: str, default: Any) -> Any:
    """The value of an option, in either spelling."""
    for argument, following in pairwise([*arguments, ""]):
        if argument == name:
            return following
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return default
