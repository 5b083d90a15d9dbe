"""Files that others may have made: only plain ones are opened, and what they expand to is limited."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from fedrts.errors import InputError

RATIO = 100
"""How many times its own size a compressed file may expand to: arrays and images that carry information stay far below."""
ALWAYS = 2**28
"""Bytes that any compressed file may expand to."""

_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))


def require_plain(path: str | Path) -> None:
    """Refuse pipes, devices and sockets, on which reading may never end; whatever else is wrong shows when the file is opened."""
    try:
        check_mode(path, os.stat(path).st_mode)
    except OSError:
        return


def check_mode(path: str | Path, mode: int) -> None:
    """The same of a file whose mode is known."""
    for is_kind, name in _KINDS:
        if is_kind(mode):
            raise InputError(f"{path} is {name}, not a plain file: save its content as a file and name that")


def most_expanded(stored: int) -> int:
    """Bytes at most that `stored` compressed bytes may expand to."""
    return max(ALWAYS, RATIO * stored)


def check_expansion(path: str | Path, stored: int, expanded: int, remedy: str) -> None:
    """Refuse a file of `stored` bytes that says that it expands to so many."""
    if expanded > most_expanded(stored):
        raise InputError(
            f"{path} has {stored:,} bytes and expands to {expanded:,}, more than {RATIO} times as many: it is damaged or made to fill "
            f"memory; {remedy}"
        )


def sha256(data: bytes) -> str:
    """A checksum as `sha256:…`, which `sha256sum` prints too."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
