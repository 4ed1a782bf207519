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


def download(published: Download, data_dir: Path) -> bool:
    """Download a file, or an archive and take its members out. Return False if all files existed before.

    Files appear in the data folder when they are complete. An interrupted download leaves nothing there.
    """
    url, name = published.url, PurePosixPath(published.url).name
    members = published.members or (name,)
    targets = [data_dir / published.folder / member for member in members]
    if all(target.is_file() for target in targets):
        return False
    unpack = pooch.Unzip if name.endswith(".zip") else pooch.Untar
    pooch.get_logger().setLevel(logging.WARNING)
    data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data_dir, prefix=".downloading-") as folder:
        try:
            pooch.retrieve(
                url,
                known_hash=published.md5 and f"md5:{published.md5}",
                fname=name,
                path=folder,
                processor=unpack(members=[*members], extract_dir="") if published.members else None,
                # Some servers reject the default agent.
                downloader=pooch.HTTPDownloader(
                    progressbar=sys.stderr.isatty(), timeout=60, headers={"User-Agent": "adahessian"}
                ),
            )
            if missing := [member for member in members if not Path(folder, member).is_file()]:
                raise FileNotFoundError(f"it lacks {', '.join(missing)}")
            for target, member in zip(targets, members, strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(folder, member), target)
        except RequestException as error:
            advice = f"Run this again, or download it elsewhere and put {targets[0]} in place"
            raise DataError(f"{url} cannot be downloaded ({error}). {advice}.") from error
        except (FileNotFoundError, ValueError, tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataError(f"{url} is not the published file ({error}). Run this again later.") from error
    return True
