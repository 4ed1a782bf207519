"""Run files: one JSON file per finished run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from adahessian.lab.errors import RunFileError

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of one run: a JSON file when it is finished, and a folder with everything else."""

    output: Path
    task: str
    label: str
    seed: int

    @property
    def result(self) -> Path:
        """The finished run."""
        return self.folder.with_name(self.folder.name + ".json")

    @property
    def folder(self) -> Path:
        """Checkpoint, weights and logs."""
        return self.output / self.task / f"{self.label.replace(' ', '_')}_seed-{self.seed}"

    @property
    def checkpoint(self) -> Path:
        """Everything that is needed to resume."""
        return self.folder / "checkpoint.pt"

    @property
    def weights(self) -> Path:
        """The final weights."""
        return self.folder / "weights.pt"

    @property
    def log(self) -> Path:
        """One line of JSON per evaluation."""
        return self.folder / "log.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Events for TensorBoard."""
        return self.folder / "tensorboard"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run, as it is stored."""

    task: str
    optimizer: str
    label: str
    seed: int
    status: Literal["finished", "diverged"]
    config: dict[str, Any]
    """:class:`adahessian.lab.configs.run.RunConfig` as nested dicts."""

    conditions: dict[str, Any]
    """Device, precision, compiled or not, number of processes."""

    curve: dict[str, list[float]]
    """One list per column: step, epoch, seconds, lr, train_loss and the metrics of each evaluation."""

    final: dict[str, float]
    """Metrics of the final weights."""

    cost: dict[str, Any]
    """exclusive, step_ms (None where unknown), peak_mib (None on a CPU), parameters."""

    selection: dict[str, Any] | None = None
    """Trials and the metric that chose this configuration, if a sweep did."""

    provenance: list[dict[str, Any]] = field(default_factory=list)
    """Command, commit, date, hardware and versions: of the start and of each continuation."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file. Values that are not finite become null."""
        return {"schema": SCHEMA, **{name: _finite(value) for name, value in asdict(self).items()}}


def read_run(path: Path) -> RunResult:
    """Read a finished run.

    Raises:
        RunFileError: If the file is damaged or not a run file.
    """
    content = read_json(path)
    if not _is_run(content):
        raise RunFileError(f"{path} is not a run file written by `adahessian train`.")
    try:
        stored = {name: content[name] for name in (each.name for each in fields(RunResult))}
    except KeyError as missing:
        raise RunFileError(f"{path} lacks {missing}. Run it again, or restore the file from a copy.") from missing
    stored["curve"] = {name: [*map(_number, column)] for name, column in stored["curve"].items()}
    stored["final"] = {name: _number(value) for name, value in stored["final"].items()}
    return RunResult(**stored)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        RunFileError: If it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFileError(f"{path} cannot be read ({error}). Restore it from a copy, or delete it.") from error


def find_run_files(paths: Iterable[Path], warn: Callable[[str], None]) -> Iterator[tuple[Path, RunResult]]:
    """Yield the finished runs among files and folders, with their files.

    Args:
        paths: Files, and folders that are searched for files.
        warn: Receives a message for each damaged file in a folder. JSON files of other kinds are skipped silently.

    Raises:
        RunFileError: If a file that was named is not a run file.
    """
    for path in paths:
        if not path.is_dir():
            yield path, read_run(path)
            continue
        for file in sorted(path.rglob("*.json")):
            try:
                if _is_run(read_json(file)):
                    yield file, read_run(file)
            except RunFileError as error:
                warn(str(error))


def _is_run(content: Any) -> bool:
    return isinstance(content, Mapping) and content.get("schema") == SCHEMA and "curve" in content


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [*map(_finite, value)] if isinstance(value, (list, tuple)) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else value
