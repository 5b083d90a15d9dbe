"""Unpacking archives: only regular files and folders, only below the target, and only up to a size limit."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from fedrts.errors import InputError
from fedrts.files import most_expanded, require_plain

MEMBERS = 1_000_000
"""Entries of an archive at most: the largest data set has 270,000 files."""
_CHUNK = 1 << 20
_COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
"""What opens a compressed file, by how it begins."""


def unpack(archive: Path, target: Path) -> None:
    """Unpack a .zip or .tar.gz archive into the folder `target`."""
    require_plain(archive)
    try:
        most = most_expanded(archive.stat().st_size)
        for name, content in _zipped(archive, most) if zipfile.is_zipfile(archive) else _tarred(archive, most):
            path = target / _inside(name, archive)
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, open(path, "wb") as file:
                while block := content.read(_CHUNK):
                    most -= len(block)
                    if most < 0:
                        raise _bomb(archive)
                    file.write(block)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{archive} is no complete .zip or .tar.gz archive: {error}; get it again") from error
    except OSError as error:
        raise InputError(f"cannot unpack {archive} into {target}: {error.strerror or error}") from error


def _tarred(archive: Path, most: int) -> Iterator[tuple[str, IO[bytes]]]:
    """Read a tar as one stream of at most `most` bytes: headers may claim any length, and holes take no space in an archive."""
    with open(archive, "rb") as file:
        start = file.read(8)
    opener = next((found for magic, found in _COMPRESSED.items() if start.startswith(magic)), open)
    with opener(archive, "rb") as stream, tarfile.open(fileobj=_Limited(stream, archive, most), mode="r|") as tar:
        for number, member in enumerate(tar):
            if number >= MEMBERS:
                raise _bomb(archive)
            tar.members.clear()  # type: ignore[attr-defined]  # nothing here goes back to one
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isfile() else None
            if content is None:
                raise _unsafe(archive, member.name, "is a link or a device")
            yield member.name, content


class _Limited(io.RawIOBase):
    """A stream that yields at most this many bytes."""

    def __init__(self, stream: IO[bytes], archive: Path, most: int) -> None:
        self.stream, self.archive, self.left = stream, archive, most

    def read(self, size: int = -1) -> bytes:
        block = self.stream.read(min(size, self.left + 1) if size >= 0 else self.left + 1)
        self.left -= len(block)
        if self.left < 0:
            raise _bomb(self.archive)
        return block


def _zipped(archive: Path, most: int) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as zip_file:
        if len(zip_file.infolist()) > MEMBERS or sum(member.file_size for member in zip_file.infolist()) > most:
            raise _bomb(archive)
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


def _bomb(archive: Path) -> InputError:
    return InputError(
        f"{archive} is not safe to unpack: it expands to more than {most_expanded(archive.stat().st_size):,} bytes or has more than "
        f"{MEMBERS:,} entries; get it from its publisher, or unpack it yourself and give the folder"
    )
