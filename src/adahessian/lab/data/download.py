"""Downloads of published files: verified, and complete or absent."""

from __future__ import annotations

import logging
import os
import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

import pooch
from requests import RequestException

from adahessian.lab.data.sources import Download
from adahessian.lab.errors import DataError

_PATIENCE_SECONDS = 60


def download(published: Download, data_dir: Path) -> bool:
    """Download a file, or an archive and take its members out. Return False if all files existed before.

    Files appear in the data folder when they are complete. An interrupted download leaves nothing there.

    Raises:
        DataError: If the file cannot be downloaded, or is not the published one.
    """
    url = published.url
    name = PurePosixPath(url).name
    targets = [data_dir / published.folder / member for member in published.members or (name,)]
    if all(target.is_file() for target in targets):
        return False
    pooch.get_logger().setLevel(logging.WARNING)
    data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data_dir, prefix=".downloading-") as folder:
        try:
            pooch.retrieve(
                url,
                known_hash=published.md5 and f"md5:{published.md5}",
                fname=name,
                path=folder,
                processor=_unpack(published, name),
                downloader=pooch.HTTPDownloader(
                    progressbar=sys.stderr.isatty(),
                    timeout=_PATIENCE_SECONDS,
                    headers={"User-Agent": "adahessian"},  # some servers reject the default
                ),
            )
            found = [Path(folder, member) for member in published.members or (name,)]
            if missing := [path.name for path in found if not path.is_file()]:
                raise FileNotFoundError(f"it lacks {', '.join(missing)}")
            for target, path in zip(targets, found, strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
        except RequestException as error:
            advice = f"Run this again, or download it elsewhere and put {targets[0]} in place"
            raise DataError(f"{url} cannot be downloaded ({error}). {advice}.") from error
        except (FileNotFoundError, ValueError, tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataError(f"{url} is not the published file ({error}). Run this again later.") from error
    return True


def _unpack(published: Download, name: str) -> pooch.processors.ExtractorProcessor | None:
    if not published.members:
        return None
    processor = pooch.Unzip if name.endswith(".zip") else pooch.Untar
    return processor(members=[*published.members], extract_dir="")
