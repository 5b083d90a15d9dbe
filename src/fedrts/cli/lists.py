"""Parsers for comma-separated flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from fedrts.errors import InputError

Numeric = TypeVar("Numeric", int, float)


def rates(text: str) -> Sequence[float] | str:
    """Parse the learning rates of --tune-lr; `auto` gives none."""
    return text if text.isalpha() else numbers("--tune-lr", text, float)


def numbers(flag: str, text: str, kind: type[Numeric]) -> list[Numeric]:
    """Parse `0,1,2` into numbers."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{flag} takes {what} with commas between them (got '{text}')") from None
