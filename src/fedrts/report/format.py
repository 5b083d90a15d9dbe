"""Number formats for people; `assets/numbers.js` formats them the same way."""

from __future__ import annotations

import math

from fedrts.report.model import CellValue, Folder, Mean

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_FLOPS = ("", "k", "M", "G", "T", "P", "E", "Z")


def text(value: float, format: str) -> str:
    """Format one number with its unit."""
    if not math.isfinite(value):
        return "–"
    if format == "percent":
        return f"{100 * value:.1f} %"
    if format == "bytes":
        return _scaled(value, _BYTES)
    if format == "flops":
        return _scaled(value, _FLOPS)
    if format == "integer":
        return f"{round(value):,}"
    if format == "seconds":
        return f"{value:,.1f} s"
    if abs(value) >= 1e9:
        return f"{value:.3e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def cell(value: CellValue | Mean, format: str) -> str:
    """Format a cell: text, a number, or a mean with its standard error."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value.name if isinstance(value, Folder) else value
    if not isinstance(value, Mean):
        return text(value, format)
    if value.error is None:
        return text(value.value, format)
    if format == "percent":
        return f"{100 * value.value:.1f} ± {100 * value.error:.1f} %"
    if format in ("bytes", "flops"):
        names = _BYTES if format == "bytes" else _FLOPS
        power = _power(value.value, names)
        middle, error = value.value / 1000**power, value.error / 1000**power
        return f"{_digits(middle)} ± {_digits(error, middle)} {names[power]}".rstrip()
    if format in ("integer", "seconds"):
        return text(value.value, format).removesuffix(" s") + " ± " + text(value.error, format)
    return f"{text(value.value, format)} ± {value.error:.2g}"


def number(value: CellValue | Mean) -> float | str | None:
    """Return the number by which a cell is sorted."""
    return value.value if isinstance(value, Mean) else value


def _scaled(value: float, names: tuple[str, ...]) -> str:
    power = _power(value, names)
    return f"{_digits(value / 1000**power)} {names[power]}".rstrip()


def _digits(value: float, like: float | None = None) -> str:
    """Format with about three digits, never as a power; with as many decimals as `like` has."""
    size = abs(value if like is None else like)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _power(value: float, names: tuple[str, ...]) -> int:
    """Return the unit in which a number has one to three digits before the point."""
    power = 0
    while abs(value) >= 999.5 and power < len(names) - 1:
        value, power = value / 1000, power + 1
    return power
