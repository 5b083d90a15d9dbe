"""Sizes, speeds and durations as people write them: `200MB`, `5Mbit/s`, `10min`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from fedrts.errors import InputError

SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""In bytes."""
SPEEDS = {f"{prefix}bit/s": factor / 8 for prefix, factor in (("", 1), ("k", 10**3), ("M", 10**6), ("G", 10**9))}
SPEEDS |= {f"{unit}/s": factor for unit, factor in SIZES.items()}
"""In bytes a second."""
DURATIONS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""In seconds."""

_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z/]*)")


def size(given: str | float, flag: str = "--budget") -> float:
    """Parse `200MB`, `1.5 GB` or `2MiB` into bytes; a number is bytes already."""
    return _parsed(given if isinstance(given, str) else f"{given:f}B", SIZES, flag, "a size such as 200MB, 1.5GB or 2MiB")


def speed(text: str, flag: str = "--link") -> float:
    """Parse `5Mbit/s` or `600kB/s` into bytes per second."""
    return _parsed(text, SPEEDS, flag, "a speed such as 5Mbit/s or 600kB/s")


def duration(text: str, flag: str = "--deadline") -> float:
    """Parse `60s`, `10min` or `2h` into seconds."""
    return _parsed(text, DURATIONS, flag, "a time such as 60s, 10min or 2h")


def _parsed(text: str, units: Mapping[str, float], flag: str, what: str) -> float:
    """Return the number times its unit; `mb` equals `MB`, but `Mb/s` is ambiguous (bits or bytes) and is refused."""
    found = _QUANTITY.fullmatch(text.strip())
    known = dict(units) | {unit.lower(): factor for unit, factor in units.items() if not unit.endswith("B/s")}
    unit = found[2] if found else ""
    if found is None or (factor := known.get(unit, known.get(unit.lower()))) is None:
        raise InputError(f"{flag} takes {what} (got '{text}')")
    value = float(found[1]) * factor
    if not 0 < value < math.inf:
        raise InputError(f"{flag} must be more than 0 and finite (got '{text}')")
    return value


def shown_size(count: float) -> str:
    """Format bytes for people, such as `199.9 MB`; MB = 10⁶."""
    for unit in ("GB", "MB", "kB"):
        if count >= SIZES[unit]:
            return f"{count / SIZES[unit]:.3g} {unit}"
    return f"{count:.0f} B"
