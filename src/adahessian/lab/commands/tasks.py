"""`adahessian tasks`: what can be trained, and with which settings."""

import csv
from collections.abc import Iterator, Sequence
from importlib.resources import files

import tyro
from tyro.conf import Positional

from adahessian.lab.commands.train import program, typed
from adahessian.lab.configs.presets import NO_DATA, PRESETS, Preset, find_preset
from adahessian.lab.configs.run import options_of


def main(argv: Sequence[str]) -> None:
    """List all tasks, or describe one."""
    name = tyro.cli(_parse, args=argv, prog="adahessian tasks")
    if name is not None:
        print("\n".join(_description(find_preset(name))))
        return
    width = max(map(len, PRESETS))
    print("\n".join(f"{preset.name:<{width}}  {preset.title}" for preset in PRESETS.values()))
    print("\n`adahessian tasks NAME` shows the settings of a task.")


def _parse(task: Positional[str | None] = None) -> str | None:
    """List tasks, or show the data, the notes and the settings of one."""
    return task


def _description(preset: Preset) -> Iterator[str]:
    options = {optimizer: options_of(config) for optimizer, config in preset.make().items()}
    first, *others = options.values()
    common = {name: value for name, value in first.items() if all(each.get(name) == value for each in others)}
    width = max(map(len, options))
    yield f"{preset.name}: {preset.title}\n\nData: {preset.data}\n\n{preset.notes}\n"
    yield f"All optimizers: {' '.join(typed(common))}\n"
    for optimizer, values in options.items():
        own = {name: value for name, value in values.items() if name not in common}
        yield f"{optimizer:<{width}}  {' '.join(typed(own))}"
    numbers = files("adahessian.lab.results").joinpath("paper_numbers.csv").read_text(encoding="utf-8")
    if rows := [row for row in csv.DictReader(numbers.splitlines()) if row["task"] == preset.name]:
        yield "\nIn the paper:"
    for row in rows:
        settings = f"{row['optimizer']} {row['override']}".strip()
        yield f"  {row['table']}, {settings}: {row['metric']} {row['mean']}{' ± ' * bool(row['std'])}{row['std']}"
    data = "" if preset.data == NO_DATA else " --data-dir DIR"
    yield f"\nTo train it: {' '.join(program())} train {preset.name}{data}"
