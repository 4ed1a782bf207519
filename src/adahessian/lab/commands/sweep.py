"""`adahessian sweep`: tune optimizers with the same number of trials each, or vary one option."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from statistics import fmean, stdev
from typing import Any

import tyro

from adahessian.lab.commands.train import execute, parse_runs, train_line
from adahessian.lab.configs import find_preset
from adahessian.lab.configs.checks import Count, Natural, Options, Positive
from adahessian.lab.configs.run import Metric, Run, RunConfig, Session, label
from adahessian.lab.errors import ConfigError
from adahessian.lab.results.run_file import RunFiles, RunResult
from adahessian.lab.training.atomic_files import write_json
from adahessian.lab.training.progress import shown

PROG = "adahessian sweep"


class Sweep(Options):
    """Tune optimizers with the same number of trials each, on validation data. Finished runs are skipped.

    All options of `adahessian train TASK OPTIMIZER` apply to every run. If a task has no validation data, the sweep
    holds out training examples (see --holdout of `adahessian train`).
    """

    trials: Count = 5  # Trials per optimizer. The first one uses the given settings.
    final_seeds: tuple[Natural, ...] = ()  # Then train the selected settings with these seeds, on all training data.
    final_budgets: tuple[Positive, ...] = (1.0,)  # Lengths of the final runs, as multiples of the trials' length.
    lr_factors: tuple[Positive, ...] = ()  # Instead of trials: multiples of the learning rate, such as 0.5 1 2.
    vary: tuple[str, ...] = ()  # Instead of trials: an option and its values, such as block-size 64 256.

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.vary) == 1:
            raise ConfigError(f"--vary {self.vary[0]} has no values. Pass an option and its values.")
        if bool(self.vary) + bool(self.lr_factors) + bool(self.final_seeds) > 1:
            raise ConfigError("--vary, --lr-factors and --final-seeds cannot be combined. Pass one of them.")
        if self.final_budgets != (1.0,) and not self.final_seeds:
            raise ConfigError("--final-budgets has no effect without --final-seeds. Pass both.")


def main(argv: Sequence[str]) -> None:
    """Run all trials, and print a table and the selected settings."""
    names = [*takewhile(lambda word: not word.startswith("-"), argv)]
    arguments: Any = argv[len(names) :]
    sweep, options = tyro.cli(Sweep, args=arguments, prog=f"{PROG} TASK OPTIMIZER ...", return_unknown_args=True)
    if len(names) < 2:
        raise ConfigError(f"A task and at least one optimizer are needed. Run: {PROG} TASK OPTIMIZER ...")
    commands = [[names[0], optimizer, *options] for optimizer in dict.fromkeys(names[1:])]
    parsed = [parse_runs(command, PROG) for command in commands]
    for run in (runs[0] for runs, _ in parsed):
        if run != _with(run, run.config):
            raise ConfigError(f"--name {run.label} would give all trials the same name. Leave it out.")
    session = replace(parsed[0][1], resume=not parsed[0][1].overwrite)
    if not (sweep.vary or sweep.lr_factors):
        _tune([[*_trials(runs, sweep.trials)] for runs, _ in parsed], sweep, session)
        return
    results = []
    for command, (runs, _) in zip(commands, parsed, strict=True):
        lrs = [f"{runs[0].config.optimizer.lr * factor:.6g}" for factor in sweep.lr_factors]
        option, *values = sweep.vary or ["lr", *lrs]
        trials = [parse_runs([*command, f"--{option}", value], PROG)[0] for value in values]
        results += [_train(trial, session) for trial in trials]
    _print_results(results, parsed[0][0][0].config.task.metric)


def _with(run: Run, config: RunConfig) -> Run:
    """Return a run of another config, named by it."""
    preset = find_preset(run.task).config(run.optimizer)
    return replace(run, config=config, label=label(run.optimizer, config, preset))


def _scaled(config: RunConfig, budget: float) -> RunConfig:
    """Return a config of another length, with its schedule. Epochs and steps are rounded."""

    def scale(length: int | None) -> Any:
        return length and max(1, round(length * budget))

    schedule, warmup = config.schedule, scale(config.schedule.lr_warmup_steps)
    schedule = replace(schedule, decay_epochs=tuple(map(scale, schedule.decay_epochs)), lr_warmup_steps=warmup)
    lengths = {name: scale(getattr(config, name)) for name in ("epochs", "steps", "eval_every")}
    return replace(config, **lengths, schedule=schedule)


def _trials(runs: Sequence[Run], count: int) -> Iterator[list[Run]]:
    """Yield the given settings, then quasi-random ones in the ranges that the optimizer's config says."""
    from torch.quasirandom import SobolEngine

    config = runs[0].config
    task, optimizer = config.task, config.optimizer
    if task.default_holdout and not task.holdout:
        task = replace(task, holdout=task.default_holdout)
    if task.validation_metric.name.startswith("test_"):
        raise ConfigError(f"{runs[0].task} has no validation data to select settings on. Pass --holdout.")
    factors = {name: factor for name, factor in optimizer.searched.items() if getattr(optimizer, name, 0)}
    points = SobolEngine(len(factors), scramble=True, seed=0).draw(count).tolist()[: count - 1]
    settings = [
        {
            name: float(f"{getattr(optimizer, name) * factor ** (2 * coordinate - 1):.3g}")
            for (name, factor), coordinate in zip(factors.items(), point, strict=True)
        }
        for point in points
    ]
    for setting in ({}, *settings):
        changed = replace(config, task=task, optimizer=replace(optimizer, **setting))
        yield [_with(run, changed) for run in runs]


def _tune(settings: Sequence[Sequence[list[Run]]], sweep: Sweep, session: Session) -> None:
    """Run the trials of each optimizer, and the selected settings with the final seeds and budgets."""
    task = settings[0][0][0].config.task
    metric = task.validation_metric
    results = [[_train(runs, session) for runs in trials] for trials in settings]
    _print_results(chain(*results), metric)
    finals: list[tuple[float, list[Run]]] = []
    for trials, found in zip(settings, results, strict=True):
        means = [(fmean(_scores(each, metric)), runs[0]) for runs, each in zip(trials, found, strict=True)]
        finite = [pair for pair in means if math.isfinite(pair[0])]
        if not finite:
            print(f"{trials[0][0].optimizer}: every trial diverged.")
            continue
        best, run = max(finite, key=lambda pair: pair[0] if metric.higher_is_better else -pair[0])
        own = find_preset(run.task).config(run.optimizer).task.holdout
        if run.config.task.holdout != own:
            run = _with(run, replace(run.config, task=replace(run.config.task, holdout=own)))
        print(f"{run.optimizer}: {shown(metric, {metric.name: best})}, the best of {len(trials)} trials")
        print(f"  {train_line(run)}", flush=True)
        for budget in sweep.final_budgets:
            final = _with(run, _scaled(run.config, budget))
            finals.append((budget, [replace(final, seed=seed) for seed in sweep.final_seeds]))
    if sweep.final_seeds and finals:
        selection = {"trials": sweep.trials, "selected_on": metric.name}
        _print_results([_train(runs, session, selection | {"budget": budget}) for budget, runs in finals], task.metric)


def _train(runs: Iterable[Run], session: Session, selection: dict[str, Any] | None = None) -> list[RunResult]:
    """Train a setting with each seed. Runs that were finished before they were selected are marked."""
    results = []
    for run in runs:
        result = execute(run, session, selection=selection)
        if selection is not None and result.selection != selection:
            result = replace(result, selection=selection)
            files = RunFiles(output=session.output, task=run.task, label=run.label, seed=run.seed)
            write_json(files.result, result.to_json())
        results.append(result)
    return results


def _scores(results: Iterable[RunResult], metric: Metric) -> list[float]:
    """Return the metric of each run's final weights, NaN for runs that diverged."""
    return [math.nan if each.status == "diverged" else each.final[metric.name] for each in results]


def _print_results(results: Iterable[Sequence[RunResult]], metric: Metric) -> None:
    print(f"\n{metric.title}: mean ± standard deviation (seeds that did not diverge)")
    for each in results:
        scores = [score for score in _scores(each, metric) if math.isfinite(score)]
        mean = f"{fmean(scores):.{metric.digits}f}" if scores else "diverged"
        spread = f" ± {stdev(scores):.{metric.digits}f}" if len(scores) > 1 else ""
        print(f"  {each[0].label}: {mean}{spread} ({len(scores)} of {len(each)})", flush=True)
