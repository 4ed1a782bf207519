"""`adahessian fetch`: the data of a task, from its owner."""

from collections.abc import Sequence
from pathlib import Path

import tyro
from tyro.conf import Positional

from adahessian.lab.configs.checks import Options
from adahessian.lab.configs.presets import NO_DATA, find_preset
from adahessian.lab.data.sources import download, downloads_of, instructions_of


class Fetch(Options):
    """Download the data of a task from its owner, or explain how to get it. Existing files are kept."""

    task: Positional[str]  # Name of the task.
    data_dir: Path = Path("data")  # Folder for the data.


def main(argv: Sequence[str]) -> None:
    """Download the data of a task, or explain how to get it."""
    options = tyro.cli(Fetch, args=argv, prog="adahessian fetch")
    preset = find_preset(options.task)
    if preset.data == NO_DATA:
        print(f"{preset.name} needs no data.")
    for published in downloads_of(preset.name):
        is_new = download(published, options.data_dir)
        print(f"{published.url}: {'downloaded' if is_new else 'exists already'}", flush=True)
    if instructions := instructions_of(preset.name):
        print(instructions)
