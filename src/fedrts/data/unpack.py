"""Taking archives apart: plain files and folders only, nowhere but under the target."""

from __future__ import annotations

import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from fedrts.errors import InputError


def unpack(archive: Path, target: Path) -> None:
    """The files of a .zip or .tar.gz archive under the folder `target`."""
    try:
        for name, content in _zipped(archive) if zipfile.is_zipfile(archive) else _tarred(archive):
            path = target / _inside(name, archive)
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, open(path, "wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{archive} is no complete .zip or .tar.gz archive: {error}; get it again") from error
    except OSError as error:
        raise InputError(f"cannot unpack {archive} into {target}: {error.strerror or error}") from error


def _tarred(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isfile() else None
            if content is None:
                raise _unsafe(archive, member.name, "is a link or a device")
            yield member.name, content


def _zipped(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as zip_file:
        for member in zip_file.infolist():
            if member.is_dir():
                continue
            mode = stat.S_IFMT(member.external_attr >> 16)
            if mode not in (0, stat.S_IFREG):
                raise _unsafe(archive, member.filename, "is a link or a device")
            yield member.filename, zip_file.open(member)


def _inside(name: str, archive: Path) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise _unsafe(archive, name, "leads out of the folder")
    return path


def _unsafe(archive: Path, name: str, why: str) -> InputError:
    return InputError(f"{archive} is not safe to unpack: its entry '{name}' {why}")
