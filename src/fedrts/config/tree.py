"""Nested tables of settings: flatten, nest and merge them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tree = Mapping[str, Any]


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest keys with dots into tables; the inverse of `flat`."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, last = key.split(".")
        table = result
        for part in tables:
            table = table.setdefault(part, {})
        table[last] = value
    return result


def flat(settings: Tree, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables into `{"train.lr": 0.1, …}`."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return result


def merged(base: Tree, over: Tree) -> dict[str, Any]:
    """Return `base` updated by `over`, tables merged key by key; tuples become lists, as in TOML."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping):
            table = result.get(key)
            result[key] = merged(table if isinstance(table, Mapping) else {}, value)
        else:
            result[key] = list(value) if isinstance(value, tuple) else value
    return result
