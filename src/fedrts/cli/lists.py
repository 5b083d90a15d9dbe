"""Values of flags with commas between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from fedrts.errors import InputError

Numeric = TypeVar("Numeric", int, float)


def rates(text: str) -> Sequence[float] | str:
    """The learning rates of --tune-lr; `auto` names none."""
    return text if text.isalpha() else numbers("--tune-lr", text, float)


def numbers(flag: str, text: str, kind: type[Numeric]) -> list[Numeric]:
    """`0,1,2` as numbers."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{flag} takes {what} with commas between them (got '{text}')") from None
