"""The compiled kernels, a separate package: whether they are installed, and with which instruction sets."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedrts_kernels import Library

PACKAGE = "fedrts-kernels"
OFF = "FEDRTS_KERNELS"
"""The environment variable that, at 0, has everything computed as if the package were not here."""


class NoKernelsError(Exception):
    """The kernels are not available; says why, and what to do."""


def kernels() -> Library:
    """Return the library, or raise a `NoKernelsError`."""
    found = f"{OFF}=0 in the environment turns {PACKAGE} off" if _is_off() else _found()
    if isinstance(found, str):
        raise NoKernelsError(found)
    return found


def installed() -> bool:
    """Whether the package is installed, with or without a compiler, and wanted."""
    if _is_off():
        return False
    try:
        import fedrts_kernels  # noqa: F401
    except ImportError:
        return False
    return True


def _is_off() -> bool:
    return os.environ.get(OFF) == "0"


@cache
def _found() -> Library | str:
    try:
        import fedrts_kernels
    except ImportError:
        return f"{PACKAGE} is not installed: pip install ./kernels, in the source of fedrts"
    try:
        return fedrts_kernels.load()
    except OSError as error:
        if not fedrts_kernels.FILE.exists():
            return f"{PACKAGE} was installed without a C compiler: install one, and {PACKAGE} again"
        return f"{PACKAGE} does not load: {str(error).splitlines()[0]}"
