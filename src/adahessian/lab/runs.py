"""Runs: what each is called, where its files are, and what is kept of it when it is finished."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from adahessian.lab.settings import REMOVED, OptimizerName, Settings, is_economical

KIND = "adahessian run"

# Settings that do not make another run: they only say how to compute the same.
_MEANS = frozenset({"workers", "cache_gib"})


def label(
    optimizer: OptimizerName, settings: Settings, defaults: Settings, economies: Mapping[str, Any] | None = None
) -> str:
    """What a run is called, by its optimizer and by those of its settings that are not the task's own.

    Args:
        optimizer: The optimizer.
        settings: The run's.
        defaults: The task's own, for this optimizer.
        economies: What being economical changes in them. Of a run that measures so, what is otherwise is said.

    Example:
        >>> from adahessian.lab.settings import Settings
        >>> paper = Settings(epochs=160, batch_size=256, lr=0.15)
        >>> label("adahessian", Settings(epochs=160, batch_size=256, lr=0.15, update_every=10), paper)
        'adahessian_update-every=10'
    """
    values = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in _MEANS}
    changed = {name for name, value in values.items() if value != getattr(defaults, name)}
    words: list[str] = [optimizer]
    if economies and is_economical(values):
        words.append("economical")
        changed = changed - economies.keys() | {name for name, value in economies.items() if values[name] != value}
    said = [f"{name.replace('_', '-')}={_short(value)}" for name, value in values.items() if name in changed]
    return "_".join([*words, *said])


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(_short, value))
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    return "".join(character if character.isalnum() or character in ".+-" else "-" for character in text)


def identity(
    *, task: str, optimizer: OptimizerName, seed: int, settings: Mapping[str, Any], precision: str, processes: int
) -> dict[str, Any]:
    """What makes a run this one and no other, in plain values, as they come out of a file."""
    decisive = {name: value for name, value in settings.items() if name not in _MEANS}
    return {
        "task": task,
        "optimizer": optimizer,
        "seed": seed,
        "precision": precision,
        "processes": processes,
        **{f"--{name.replace('_', '-')}": value for name, value in json.loads(json.dumps(decisive)).items()},
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """In what two identities differ, in words; empty if in nothing."""
    # A file may lack a setting that is newer, or have one that was removed since: both count as at their defaults.
    defaults = {**{field.name: field.default for field in fields(Settings)}, **REMOVED}
    before = {f"--{name.replace('_', '-')}": default for name, default in defaults.items()}
    keys = {*one, *other}
    return ", ".join(sorted(key for key in keys if one.get(key, before.get(key)) != other.get(key, before.get(key))))


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of one run. The finished run is one JSON file; all else is in a folder beside it."""

    output: Path
    task: str
    name: str
    seed: int

    @property
    def result(self) -> Path:
        """Written when the run is finished."""
        return self.output / self.task / f"{self.name}_seed-{self.seed}.json"

    @property
    def folder(self) -> Path:
        """For what is of use while the run goes on."""
        return self.output / self.task / f"{self.name}_seed-{self.seed}"

    @property
    def checkpoint(self) -> Path:
        """All that is needed to go on."""
        return self.folder / "checkpoint.pt"

    @property
    def weights(self) -> Path:
        """The final weights."""
        return self.folder / "weights.pt"

    @property
    def log(self) -> Path:
        """A line of JSON for each epoch."""
        return self.folder / "log.jsonl"

    @property
    def tensorboard(self) -> Path:
        """For TensorBoard."""
        return self.folder / "tensorboard"


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run."""

    task: str
    name: str
    """Its label, or what the user called it."""

    optimizer: OptimizerName
    seed: int
    settings: dict[str, Any]
    conditions: dict[str, Any]
    """Device, precision, processes, and whether it was compiled."""

    shared: bool
    """Whether other programs used the device meanwhile, so that times mean little."""

    epochs: list[dict[str, float]]
    """Of each epoch its number, steps so far, training loss, lr, seconds of training so far, and what was evaluated."""

    final: dict[str, float]
    """What the final weights came to."""

    diverged: bool
    """Whether the loss was not finite any more, and the run was ended early."""

    parameters: int
    peak_bytes: int | None
    """The most memory that was allocated on the device; None on a CPU."""

    provenance: list[dict[str, Any]]
    """Commit, command, versions and hardware: of the start, and of each continuation."""

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it this run and no other."""
        return identity(
            task=self.task,
            optimizer=self.optimizer,
            seed=self.seed,
            settings=self.settings,
            precision=self.conditions["precision"],
            processes=self.conditions["processes"],
        )

    def to_json(self) -> dict[str, Any]:
        """As it is stored. What is not finite is null there, as JSON has no other word for it."""
        return {"kind": KIND, **asdict(self), "epochs": [*map(finite, self.epochs)], "final": finite(self.final)}


def finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers, with None for those that are not finite."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


class NotARunError(Exception):
    """A file that is no finished run."""


class BrokenRunError(NotARunError):
    """A file that may have been one."""


def read_result(path: Path) -> Result:
    """Read a finished run.

    Raises:
        NotARunError: If it is none.
        BrokenRunError: If it cannot be read, or is not a whole one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenRunError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, Mapping) or content.get("kind") != KIND:
        raise NotARunError(f"{path} is no run that adahessian train has written")
    try:
        stored = {field.name: content[field.name] for field in fields(Result)}
    except KeyError as missing:
        raise BrokenRunError(f"{path} lacks {missing}: it was written by another version, or changed") from missing
    stored["epochs"] = [*map(_numbers, stored["epochs"])]
    stored["final"] = _numbers(stored["final"])
    return Result(**stored)


def _numbers(stored: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in stored.items()}


def find_results(paths: Iterable[Path], tell: Callable[[str], None]) -> Iterator[Result]:
    """The finished runs among files, and in folders and theirs.

    Args:
        paths: The files and folders.
        tell: Is told of broken files in folders. These are passed over, as are files that are no runs at all.

    Raises:
        NotARunError: If a file that was named is none.
    """
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*.json")):
                try:
                    yield read_result(file)
                except BrokenRunError as broken:
                    tell(f"passed over: {broken}")
                except NotARunError:
                    continue
        else:
            yield read_result(path)


def find_unfinished(paths: Iterable[Path]) -> list[Path]:
    """The folders, among these and in them, of runs that have a checkpoint to go on from."""
    return sorted(file.parent for path in paths if path.is_dir() for file in path.rglob("checkpoint.pt"))


def find_notes(paths: Iterable[Path]) -> dict[str, list[str]]:
    """What is written down of runs in folders, by task: the lines of ``notes.txt`` beside them."""
    notes: dict[str, list[str]] = {}
    for path in paths:
        for file in sorted(path.rglob("notes.txt")) if path.is_dir() else ():
            lines = file.read_text(encoding="utf-8").splitlines()
            notes.setdefault(file.parent.name, []).extend(line for line in lines if line.strip())
    return notes
