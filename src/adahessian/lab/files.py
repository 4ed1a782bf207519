"""Files that are either written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


def cache_folder() -> Path:
    """For what can be made again: ``adahessian`` in ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adahessian"


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its place under its name only when all of it is on the disk.

    Whatever goes wrong, be it a full disk, leaves the file as it was before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


class TakenError(Exception):
    """A folder that another process has taken."""


@contextmanager
def taken(folder: Path) -> Iterator[None]:
    """Have a folder to oneself, among those who ask. The system lets go of it however the process ends.

    Raises:
        TakenError: If another process has it.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix: nobody is asked
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TakenError(f"another process is at work in {folder}") from error
        except OSError:  # some network file systems know no locks
            pass
        yield
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Write JSON, indented, whole or not at all."""
    with written_whole(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
