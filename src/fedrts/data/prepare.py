"""Putting a data set's official files in place, by download or from a local archive or folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fedrts import data
from fedrts.data.contract import Data
from fedrts.data.download import ReportBytes, download, verify
from fedrts.data.official import File, Source
from fedrts.data.unpack import unpack
from fedrts.errors import InputError
from fedrts.files import require_plain


def prepare(name: str, home: Path, given: Path | None, report: ReportBytes) -> Data:
    """The data set, read through once, after what was missing of it has been put under `home`.

    A file that is downloaded or `given` must have the checksum that was published; a given folder is taken as it is. What was taken of
    `given` does not stay if it cannot be read.
    """
    source = data.source(name)
    if source is None:
        raise InputError(f"the data set '{name}' needs no preparation: it has no files of its own")
    if given is not None and not given.exists():
        raise InputError(f"there is no {given}: --from names an archive, a file or a folder of '{name}'")
    if given is not None:
        require_plain(given)
    taken: list[Path] = []
    try:
        for file in source.files:
            if not source.lacks(file, home):
                continue
            if given is None:
                _fetch(source, file, home, report)
            elif (found := _found(given, file)) is not None:
                _take(source, file, home, found, checked=found == given)
                taken.append(home / file.to)
    except OSError as error:
        raise InputError(f"cannot write to {home}: {error.strerror or error}; free the space or choose another --data-dir") from error
    if given is not None and source.missing(home):
        names = " and no ".join(file.name for file in source.files if source.lacks(file, home))
        raise InputError(f"{given} does not hold all of '{name}': it has no {names}; give what is missing with --from too")
    source.require(name, home)
    try:
        return data.load(name, {}, home)
    except InputError:
        for path in taken:
            _remove(path)
        raise


def _fetch(source: Source, file: File, home: Path, report: ReportBytes) -> None:
    """Download a file to its place, or an archive and unpack it."""
    if not file.archive:
        download(file.url, home / file.to, file.checksum, report)
        return
    archive = home / "downloads" / file.name
    if archive.exists():  # it stays until its content is in place
        try:
            verify(archive, file.checksum, str(archive))
        except InputError:
            archive.unlink()
    if not archive.exists():
        download(file.url, archive, file.checksum, report)
    _take(source, file, home, archive, checked=False)
    archive.unlink()


def _take(source: Source, file: File, home: Path, found: Path, checked: bool) -> None:
    """Copy `found`, or its content, to the place of `file`: completely or not at all."""
    target = home / file.to
    staged = home / f".{target.name}.preparing"
    _remove(staged)
    if checked and found.is_file():
        verify(found, file.checksum, str(found))
    if file.archive and target.exists():
        raise InputError(f"{target} is there but incomplete: remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if found.is_dir():
            shutil.copytree(_content(source, file, found), staged, ignore=shutil.ignore_patterns(".*"))
            os.replace(staged, target)
        elif file.archive:
            unpack(found, staged)
            os.replace(_content(source, file, staged), target)
        else:
            shutil.copyfile(found, staged)
            os.replace(staged, target)
    finally:
        _remove(staged)


def _found(given: Path, file: File) -> Path | None:
    """Find `file` in `given`: itself, or an entry named like the file or like its place."""
    if given.is_file():
        return given if file.archive or given.name == Path(file.to).name else None
    entries = (given / file.to, given / Path(file.to).name, given / file.name)
    return next((entry for entry in entries if entry.exists()), given if file.archive else None)


def _content(source: Source, file: File, folder: Path) -> Path:
    """Return the folder under `folder` (it, or one in it) that holds the needed files."""
    needed = [path.removeprefix(f"{file.to}/") for path in source.needed if path.startswith(f"{file.to}/")]
    for root in (folder, *sorted(entry for entry in folder.iterdir() if entry.is_dir())):
        if all((root / path).exists() for path in needed):
            return root
    raise InputError(f"there is no {needed[0]} in {file.name} or the folder given for it: it is not what {file.url} holds; get it again")


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
