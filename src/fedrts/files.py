"""Safe file access: open only regular files, limit what archives expand to, and write files atomically."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fedrts import __version__
from fedrts.errors import InputError

RATIO = 100
"""How many times its own size a compressed file may expand to: arrays and images that carry information stay far below."""


ALWAYS = 2**28
"""Bytes that any compressed file may expand to."""


_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))


class NewerError(InputError):
    """A file of a format that only a later version of fedrts knows; it is not damaged."""


def require_known(found: object, known: int, what: str | Path) -> None:
    """Refuse a format with a number above those that are `known`; files of before there were such numbers have none."""
    if isinstance(found, int) and found > known:
        raise NewerError(f"{what} has format {found}, and this fedrts ({__version__}) knows formats up to {known}: install a later one")


def require_plain(path: str | Path) -> None:
    """Refuse pipes, devices and sockets, on which reading may never end; other problems show when the file is opened."""
    try:
        check_mode(path, os.stat(path).st_mode)
    except OSError:
        return


def check_mode(path: str | Path, mode: int) -> None:
    """The same check for a file whose mode is known."""
    for is_kind, name in _KINDS:
        if is_kind(mode):
            raise InputError(f"{path} is {name}, not a plain file: save its content as a file and name that")


def most_expanded(stored: int) -> int:
    """Return the number of bytes to which `stored` compressed bytes may expand."""
    return max(ALWAYS, RATIO * stored)


def check_expansion(path: str | Path, stored: int, expanded: int, remedy: str) -> None:
    """Refuse a file of `stored` bytes that claims to expand to more than is allowed."""
    if expanded > most_expanded(stored):
        raise InputError(
            f"{path} has {stored:,} bytes and expands to {expanded:,}, more than {RATIO} times as many: it is damaged or made to fill "
            f"memory; {remedy}"
        )


def sha256(data: bytes) -> str:
    """Return a checksum as `sha256:…`, the digest that `sha256sum` prints too."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def write_atomically(path: Path, data: bytes, temporary: str = ".{}.tmp") -> None:
    """Write `data` to `path` completely or not at all: temporary file, fsync, rename, fsync of the folder."""
    temporary_path = path.with_name(temporary.format(path.name))
    try:
        with explained(path):
            with open(temporary_path, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary_path, path)
            _sync_folder(path.parent)
    except InputError:
        with contextlib.suppress(OSError):
            temporary_path.unlink(missing_ok=True)
        raise


def write_privately(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    before = os.umask(0o077)
    try:
        write_atomically(path, data)
    finally:
        os.umask(before)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Describe a failed write in one line that names the file."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}; free the space or change the permissions, then try again or resume the run"
        ) from error


def _sync_folder(folder: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Format rows as CSV; text that a spreadsheet would evaluate gets a leading apostrophe. Numbers stay numbers."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([_harmless(cell) for cell in row] for row in rows)
    return buffer.getvalue()


def _harmless(cell: object) -> object:
    if not isinstance(cell, str) or not cell.startswith(_FORMULA) or _is_number(cell):
        return cell
    return f"'{cell}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
