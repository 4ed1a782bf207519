"""Run files: one JSON file per finished run."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from adahessian.lab.errors import RunFileError

SCHEMA = 2


class RunFiles:
    """The files of one run: a JSON file once the run is finished, and a folder for everything else."""

    def __init__(self, *, output: Path, task: str, label: str, seed: int) -> None:
        self.folder = output / task / f"{label.replace(' ', '_')}_seed-{seed}"
        self.result = self.folder.with_name(f"{self.folder.name}.json")
        self.checkpoint = self.folder / "checkpoint.pt"
        self.weights = self.folder / "weights.pt"
        self.log = self.folder / "log.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run, as it is stored."""

    task: str
    optimizer: str
    label: str
    seed: int
    status: Literal["finished", "diverged"]
    config: dict[str, Any]  # RunConfig as nested dicts
    conditions: dict[str, Any]  # device, precision, compiled or not, number of processes
    curve: dict[str, list[float]]  # a list per column: step, epoch, seconds, lr, train_loss, metrics of each evaluation
    final: dict[str, float]  # metrics of the final weights
    cost: dict[str, Any]  # exclusive, step_ms (None where unknown), peak_mib (None on a CPU), parameters
    selection: dict[str, Any] | None = None  # trials and the metric that chose this configuration, if a sweep did
    provenance: list[dict[str, Any]] = field(default_factory=list)  # of the start and of each continuation

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file. Values that are not finite become null."""
        return {"schema": SCHEMA, **json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)}


def read_run(path: Path) -> RunResult:
    """Read a finished run, or raise RunFileError."""
    if (content := read_stored(path, "curve")) is None:
        raise RunFileError(f"{path} is not a run file written by `adahessian train`.")
    try:
        stored = {option.name: content[option.name] for option in fields(RunResult)}
    except KeyError as missing:
        raise RunFileError(f"{path} lacks {missing}. Run it again, or restore the file from a copy.") from missing
    for column in stored["curve"].values():
        column[:] = [math.nan if value is None else value for value in column]
    stored["final"] = {name: math.nan if value is None else value for name, value in stored["final"].items()}
    return RunResult(**stored)


def read_stored(path: Path, key: Literal["curve", "rows"]) -> dict[str, Any] | None:
    """Read a run (``"curve"``) or a benchmark (``"rows"``). Return None for other JSON files."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFileError(f"{path} cannot be read ({error}). Restore it from a copy, or delete it.") from error
    return content if isinstance(content, dict) and content.get("schema") == SCHEMA and key in content else None


def find_runs(paths: Sequence[Path], warn: Callable[[str], None]) -> Iterator[tuple[Path, RunResult]]:
    """Yield run files, and those in folders, with their runs. Damaged files in folders are reported to ``warn``."""
    for path in paths:
        if not path.is_dir():
            yield path, read_run(path)
        for file in sorted(path.rglob("*.json")):
            try:
                if read_stored(file, "curve"):
                    yield file, read_run(file)
            except RunFileError as error:
                warn(str(error))
