"""Finding and reading files of data."""

from collections.abc import Iterator
from pathlib import Path

from adahessian.lab.errors import DataError


def find_file(data_dir: Path, folder: str, name: str) -> Path:
    """Return the path of a file in a folder of ``data_dir``, or in ``data_dir`` itself."""
    for path in (data_dir / folder / name, data_dir / name):
        if path.is_file():
            return path
    raise DataError(f"{data_dir} has neither {folder}/{name} nor {name}. Put one there, or pass another --data-dir.")


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their line feeds. Other separators are part of a line."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                # Some files begin with a byte-order mark.
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}). Put it there, or pass another --data-dir.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number} is not UTF-8. Fetch the file again, or convert it.") from error
    if number == 0:
        raise DataError(f"{path} is empty. Fetch it again.")
