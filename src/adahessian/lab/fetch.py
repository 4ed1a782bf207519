"""``adahessian fetch``: the data of a task from its owner, verified, and resumed where it was interrupted."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from adahessian.lab.data.sources import SOURCES, Download, Source, source_of

_CHUNK = 1 << 18
_PATIENCE_SECONDS = 60


class FetchError(Exception):
    """A file that could not be had. The message says which, why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Fetch the data of a task from its owner, or say how to get it by hand."""

    task: tyro.conf.Positional[str]
    """A task of ``adahessian train``, such as cifar10-resnet20."""

    data_dir: Path = Path("data")
    """Where the data goes, and what ``adahessian train`` is to be given."""

    from_url: str | None = None
    """Another address: of the file, or with / at its end of the folder that has the files by their owner's names.
    Checksums are the owner's all the same."""

    def run(self) -> None:
        """Fetch what is missing, verify it, and say what is left to do by hand."""
        source = source_of(self.task)
        if source is None:
            names = ", ".join(name for source in SOURCES for name in source.tasks)
            raise SystemExit(f"adahessian fetch: no data is known of {self.task}. Tasks begin with one of: {names}")
        console = Console()
        try:
            self._fetch(source, console)
        except FetchError as error:
            raise SystemExit(f"adahessian fetch: {error}") from None

    def _fetch(self, source: Source, console: Console) -> None:
        _say(console, f"{source.title}, {source.page}" if source.page else source.title)
        for files in source.unpacked if self.from_url is None else ():
            if all((self.data_dir / file).is_file() for file in files):
                _say(
                    console, f"It is there already, in {self.data_dir / files[0]} and so on: --data-dir {self.data_dir}"
                )
                return
        addresses = {download: self._address(download, source) for download in source.downloads}
        if not addresses and self.from_url is not None:
            raise FetchError(f"{source.title} is not a file that could be fetched from an address. {source.by_hand}")
        if not addresses or None in addresses.values():
            _say(console, source.by_hand)
        else:
            for download, url in addresses.items():
                assert url is not None
                _have(download, url, self.data_dir, console)
            _say(console, f"It is there: --data-dir {self.data_dir}")
        if source.besides:
            _say(console, source.besides)

    def _address(self, download: Download, source: Source) -> str | None:
        if self.from_url is None:
            return download.url
        if self.from_url.endswith("/"):
            return self.from_url + PurePosixPath(download.file).name
        if len(source.downloads) > 1:
            names = ", ".join(PurePosixPath(part.file).name for part in source.downloads)
            raise FetchError(
                f"{source.title} has several files ({names}): --from-url must be the folder with all of them, with / "
                "at its end"
            )
        return self.from_url


def _have(download: Download, url: str, data_dir: Path, console: Console) -> None:
    """See to it that a file, or all that is taken out of it, is in the data folder. What is there stays."""
    target = data_dir / download.file
    wanted = [target.parent / member for member in download.members] or [target]
    if download.members and all(path.is_file() for path in wanted):
        _say(console, f"  {', '.join(path.name for path in wanted)} already there")
        return
    if target.is_file():
        if download.md5 is not None and _md5(target) != download.md5:
            raise FetchError(
                f"{target} is there, but is not what its owner publishes: its md5 is not {download.md5}. Move it away, "
                "and run this again"
            )
        _say(console, f"  {target.name} already there{', as published' if download.md5 else ''}")
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        _download(url, part, download.size, console)
        _verify(part, download, url, console)
        part.replace(target)
    if download.members:
        _take_out(target, download.members)
        target.unlink()


def _verify(part: Path, download: Download, url: str, console: Console) -> None:
    if download.md5 is None:
        _say(console, "  no checksum of it is known: the task checks its rows when it reads them")
        return
    found = _md5(part)
    if found != download.md5:
        part.unlink()
        raise FetchError(
            f"what came from {url} is not what the owner publishes: its md5 is {found} instead of {download.md5}. It "
            "was removed. Run this again, or name another address with --from-url"
        )
    _say(console, f"  md5 {found}, as published")


def _download(url: str, part: Path, size: int | None, console: Console) -> None:
    """Write what is behind an address to a file, after what an interrupted download has left there."""
    begin = part.stat().st_size if part.is_file() else 0
    try:
        with _open(url, begin) as response:
            # A server that knows no ranges answers with the whole file: that begins anew.
            resumed = response.status == http.client.PARTIAL_CONTENT
            done = begin if resumed else 0
            length = response.headers.get("Content-Length")
            total = done + int(length) if length else size
            with part.open("ab" if resumed else "wb") as file:
                done = _copy(response, file, _bar(console, part.stem), done, total)
    except HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and begin:
            if error.headers.get("Content-Range") == f"bytes */{begin}":
                return
            # Longer than the file is now: it must be of another one.
            part.unlink()
            return _download(url, part, size, console)
        raise FetchError(
            f"{url} answers {error.code} {error.reason}. Name another address with --from-url, or get the file by hand "
            "and give its folder with --data-dir"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise FetchError(
            f"{url} cannot be reached, or broke off ({reason}). Run this again to go on, or get the file by hand on a "
            "machine with a network, and give its folder with --data-dir"
        ) from error
    except ValueError as error:
        raise FetchError(f"{url} is not an address ({error})") from error
    if total is not None and done < total:
        raise FetchError(f"{url} broke off after {done:,} of {total:,} bytes. Run this again to go on from there")


def _open(url: str, begin: int) -> Any:
    # Some owners' servers turn Python's own name away.
    headers = {"User-Agent": "adahessian"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    response = urlopen(Request(url, headers=headers), timeout=_PATIENCE_SECONDS)
    given = response.headers.get("Content-Range", "")
    if response.status == http.client.PARTIAL_CONTENT and not given.startswith(f"bytes {begin}-"):
        response.close()
        raise http.client.HTTPException(f"asked for what follows byte {begin}, it sends another part, {given!r}")
    return response


def _copy(response: IO[bytes], file: IO[bytes], bar: Progress, done: int, total: int | None) -> int:
    with bar:
        task = bar.add_task("", total=total, completed=done)
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            done += len(chunk)
            bar.update(task, completed=done)
    return done


def _bar(console: Console, name: str) -> Progress:
    return Progress(
        TextColumn(f"  {name}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _take_out(archive: Path, members: tuple[str, ...]) -> None:
    """Put files of an archive next to it, whatever folder they have inside. None is there before it is whole."""
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpacking-") as folder:
        try:
            if zipfile.is_zipfile(archive):
                with zipfile.ZipFile(archive) as zipped:
                    names = {PurePosixPath(name).name: name for name in zipped.namelist()}
                    found = {member: Path(zipped.extract(names[member], folder)) for member in members}
            else:
                found = _take_out_of_tar(archive, members, Path(folder))
        except (KeyError, tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, zlib.error) as error:
            raise FetchError(
                f"{archive} is not an archive with {', '.join(members)} in it ({error}). Remove it, and run this again"
            ) from error
        for member, path in found.items():
            shutil.move(path, archive.parent / member)


def _take_out_of_tar(archive: Path, members: tuple[str, ...], folder: Path) -> dict[str, Path]:
    found = {}
    with tarfile.open(archive) as tar:
        for entry in tar:
            name = PurePosixPath(entry.name).name
            if entry.isfile() and name in members:
                tar.extract(entry, folder, filter="data")
                found[name] = folder / entry.name
    return {member: found[member] for member in members}


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
