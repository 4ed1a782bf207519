"""``adahessian study``: the paper's sweeps, and some it did not make, over any task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

import tyro
from rich.console import Console

from adahessian.lab.processes import is_first
from adahessian.lab.runs import label
from adahessian.lab.settings import OptimizerName, Settings
from adahessian.lab.tasks.registry import UnknownTaskError, experiment_named
from adahessian.lab.train import ECONOMICAL, Session, run_one

StudyName = Literal[
    "delay",
    "block-size",
    "learning-rate",
    "averaging",
    "probes",
    "batch-fraction",
    "hessian-power",
    "beta2",
]
STUDY_NAMES: tuple[StudyName, ...] = get_args(StudyName)

# The paper measures at every step of the first five epochs, and then at every second, third, fourth or fifth.
DELAYS = (1, 2, 3, 4, 5, 10, 20)
DELAY_MEASURED_EPOCHS = 5.0
LR_FACTORS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 10.0)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PROBES = (1, 2, 4)
FRACTIONS = (0.125, 0.25, 0.5, 1.0)
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
BETA2S = (0.9, 0.98, 0.99, 0.999)


@dataclass(frozen=True)
class Variant:
    """One run of a study."""

    optimizer: OptimizerName
    settings: Settings


def variants(study: StudyName, defaults: dict[OptimizerName, Settings], *, economical: bool) -> list[Variant]:
    """What a study runs.

    Args:
        study: Which one.
        defaults: The task's settings for each optimizer.
        economical: Whether to vary around the economical setting instead of the paper's.
    """
    base = defaults["adahessian"]
    if economical:
        base = replace(base, **ECONOMICAL)  # type: ignore[arg-type]

    def each(**changes: Sequence[Any]) -> list[Variant]:
        (name, values), *_ = changes.items()
        return [Variant("adahessian", replace(base, **{name: value})) for value in values]

    if study == "delay":
        return [
            Variant(
                "adahessian",
                replace(base, update_every=delay, measured_epochs=DELAY_MEASURED_EPOCHS if delay > 1 else 0.0),
            )
            for delay in DELAYS
        ]
    if study == "learning-rate":
        names: tuple[OptimizerName, ...] = ("adahessian", "adamw")
        around = {"adahessian": base, "adamw": defaults.get("adamw")}
        return [
            Variant(name, replace(settings, lr=factor * settings.lr))
            for name in names
            if (settings := around[name]) is not None
            for factor in LR_FACTORS
        ]
    if study == "beta2":
        return [
            Variant("adahessian", replace(base, betas=(base.betas[0], beta2), beta2_per=per))
            for per in ("measurement", "step")
            for beta2 in BETA2S
        ]
    if study == "block-size":
        return each(block_size=BLOCK_SIZES)
    if study == "averaging":
        return each(averaging=("magnitude", "signed"))
    if study == "probes":
        return each(num_probes=PROBES)
    if study == "batch-fraction":
        return each(batch_fraction=FRACTIONS)
    return each(hessian_power=POWERS)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Sweep one setting of AdaHessian over a task. What is finished is passed over, what was interrupted goes on."""

    study: tyro.conf.Positional[StudyName]
    """What to vary."""

    task: str
    """The task, as `adahessian tasks` lists them."""

    seeds: tuple[int, ...] = (1,)
    """Seeds, one run each."""

    economical: bool = False
    """Vary around AdaHessian on a quarter of the batch at every tenth step, not around the paper's setting."""

    epochs: int | None = None
    """Length of each run, by default the task's."""

    session: Annotated[Session, tyro.conf.arg(name="")] = field(default_factory=Session)

    def run(self) -> None:
        """Run all variants, seed after seed."""
        try:
            experiment = experiment_named(self.task)
        except UnknownTaskError as error:
            raise SystemExit(f"adahessian study: {error}") from error
        console = Console(quiet=not is_first())
        session = replace(self.session, resume=not self.session.overwrite)
        for seed in self.seeds:
            for variant in variants(self.study, dict(experiment.defaults), economical=self.economical):
                settings = variant.settings
                if self.epochs is not None:
                    settings = replace(settings, epochs=self.epochs)
                name = label(variant.optimizer, settings, experiment.defaults[variant.optimizer])
                run_one(experiment, variant.optimizer, settings, seed, name, session, console)
