"""Tables of an experiment: frozen, typed, without unknown keys; a mistake gives one line that names the key."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from fedrts.errors import nearest
from fedrts.registry import IMPORT_PATH, Registry

Number = Annotated[float, Field(allow_inf_nan=False)]


class Table(BaseModel):
    """Keys that belong together, with defaults, ranges and descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def but(self, **changes: Any) -> Self:
        """Return this table with some `changes`."""
        return self.model_copy(update=changes)


@dataclass(frozen=True)
class Named:
    """Marks a key that names an entry of a registry, or your own object by import path: `Annotated[str, Named(registry)]`.

    No import path is followed here: reading settings runs nobody's code.
    """

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._known)

    def _known(self, name: object) -> str:
        names = self.registry.names()
        if isinstance(name, str) and (name in names or IMPORT_PATH.fullmatch(name)):
            return name
        known = ", ".join(map(repr, names))
        raise PydanticCustomError("unknown_name", "Input should be {known} or an import path MODULE:NAME", {"known": known})


def explained(error: ValidationError, kind: type[BaseModel], prefix: str = "") -> str:
    """Return one line for the first mistake of a validation; it names the key (after `prefix`) and the allowed values."""
    errors = error.errors()
    first = next((entry for entry in errors if entry["type"] == "extra_forbidden"), errors[0])  # a typo hides what it meant
    path = [str(part) for part in first["loc"]]
    if first["type"] == "missing":
        return f"the key '{prefix}{'.'.join(path)}' is missing"
    if first["type"] == "extra_forbidden":
        return f"unknown key '{prefix}{'.'.join(path)}'{_meant(kind, path, prefix)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    path = path[: _depth(kind, path)]  # where several types are allowed, pydantic names the one that it tried
    tried = [entry["msg"] for entry in error.errors() if [str(part) for part in entry["loc"]][: len(path)] == path]
    message = "a table of keys" if first["type"] in ("model_type", "dict_type") else " or ".join(map(_in_signs, dict.fromkeys(tried)))
    if table := _table(kind, path):
        message += f", such as {'.'.join([*path, next(iter(table.model_fields))])}"
    return f"{prefix}{'.'.join(path)} must be {_allowed(kind, path) or message} (got {first['input']!r})"


def _meant(kind: type[BaseModel], path: list[str], prefix: str) -> str:
    """Return the key that an unknown one may stand for: the same name in another table, or the nearest name in any table."""
    *table, name = path
    own = _table(kind, table)
    here = list(own.model_fields) if own else []
    elsewhere: dict[str, list[str]] = {}
    for place, inner in ((place, _table(kind, [place])) for place in kind.model_fields):
        for key in inner.model_fields if inner else ():
            elsewhere.setdefault(key, []).append(f"{place}.{key}")
    close = difflib.get_close_matches(name, [*here, *elsewhere], n=1, cutoff=0.6)
    if not close or close[0] in here:
        return nearest(name, here, prefix + "".join(f"{part}." for part in table))
    return f"; did you mean {' or '.join(map(repr, elsewhere[close[0]]))}?"


def _in_signs(message: str) -> str:
    """Translate pydantic's description of allowed input into relation signs."""
    message = message.removeprefix("Input should be ")
    for words, sign in (("greater than or equal to", "≥"), ("greater than", ">"), ("less than or equal to", "≤"), ("less than", "<")):
        message = message.replace(words, sign)
    return message


def _depth(kind: type[BaseModel], path: list[str]) -> int:
    """Return how many parts of a path lead to a key."""
    return next((depth for depth in range(1, len(path)) if _table(kind, path[:depth]) is None), len(path))


def _allowed(kind: type[BaseModel], path: list[str]) -> str:
    """Return the range of a numeric key, such as `> 0 and ≤ 1`."""
    owner = _table(kind, path[:-1])
    if owner is None or path[-1] not in owner.model_fields:
        return ""
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [
        f"{sign} {getattr(limit, name):g}"
        for limit in owner.model_fields[path[-1]].metadata
        for name, sign in signs.items()
        if hasattr(limit, name)
    ]
    whole = owner.model_fields[path[-1]].annotation is int
    return f"a {'whole ' * whole}number {' and '.join(bounds)}" if bounds else ""


def _table(kind: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """Return the table at `path` inside `kind`."""
    for part in path:
        inner = kind.model_fields[part].annotation if part in kind.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return None
        kind = inner
    return kind
