"""Mistakes in settings, each as one line that names the key and what is allowed."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedrts.config.sources import SHORT
from fedrts.config.tree import Tree, flat
from fedrts.errors import InputError, nearest

Model = TypeVar("Model", bound=BaseModel)
_MOST = 2**31
"""What whole numbers stay below: nobody means more, and nothing would come of it."""


def validated(kind: type[Model], settings: Tree, prefix: str = "") -> Model:
    """`kind` of `settings`; the first mistake is an InputError that names the key and what is allowed."""
    try:
        found = kind.model_validate(settings)
    except ValidationError as error:
        raise InputError(_explained(error, kind, prefix)) from error
    for key, value in flat(found.model_dump()).items():
        if type(value) is int and value >= _MOST and key.rpartition(".")[2] != "seed":
            raise InputError(f"{prefix}{key} must be a whole number below {_MOST:,} (got {value})")
    return found


def check_options(table: str, options: Tree, function: Any, own: Iterable[str], extra: set[str]) -> None:
    """Are `options` keyword arguments of `function` (less `own`, which we pass) or among `extra`?"""
    parameters = inspect.signature(function).parameters
    known = (set(parameters) - set(own)) | extra
    for key in options:
        if key not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise InputError(f"unknown key '{table}.{key}'{nearest(key, known)}")
    if not isinstance(options.get("prune_output", False), bool):
        raise InputError(f"{table}.prune_output must be true or false (got {options['prune_output']!r})")


def _explained(error: ValidationError, kind: type[BaseModel], prefix: str) -> str:
    """One line for the first mistake of a validation."""
    errors = error.errors()
    first = next((entry for entry in errors if entry["type"] == "extra_forbidden"), errors[0])  # a typo hides what it meant
    path = [str(part) for part in first["loc"]]
    if first["type"] == "missing":
        return f"the key '{prefix}{'.'.join(path)}' is missing"
    if first["type"] == "extra_forbidden":
        return f"unknown key '{prefix}{'.'.join(path)}'{_meant(kind, path)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    path = path[: _depth(kind, path)]  # where several types are allowed, pydantic names the one that it tried
    tried = [entry["msg"] for entry in error.errors() if [str(part) for part in entry["loc"]][: len(path)] == path]
    message = "a table of keys" if first["type"] in ("model_type", "dict_type") else " or ".join(map(_in_signs, tried))
    if path[-1] in SHORT and first["type"] == "model_type":  # a flag of that name stands for one of them
        message += f", such as {'.'.join(SHORT[path[-1]])}"
    return f"{prefix}{'.'.join(path)} must be {_allowed(kind, path) or message} (got {first['input']!r})"


def _meant(kind: type[BaseModel], path: list[str]) -> str:
    """The key that an unknown one may stand for: of that very name in another table, or of the name that is nearest in any table."""
    *table, name = path
    own = _table(kind, table)
    here = list(own.model_fields) if own else []
    elsewhere: dict[str, list[str]] = {}
    for place, inner in ((place, _table(kind, [place])) for place in kind.model_fields):
        for key in inner.model_fields if inner else ():
            elsewhere.setdefault(key, []).append(f"{place}.{key}")
    close = difflib.get_close_matches(name, [*here, *elsewhere], n=1, cutoff=0.6)
    if not close or close[0] in here:
        return nearest(name, here)
    return f"; did you mean {' or '.join(map(repr, elsewhere[close[0]]))}?"


def _in_signs(message: str) -> str:
    """What pydantic says an input should be, with signs for relations."""
    message = message.removeprefix("Input should be ")
    for words, sign in (("greater than or equal to", "≥"), ("greater than", ">"), ("less than or equal to", "≤"), ("less than", "<")):
        message = message.replace(words, sign)
    return message


def _depth(kind: type[BaseModel], path: list[str]) -> int:
    """How many parts of a path lead to a key."""
    return next((depth for depth in range(1, len(path)) if _table(kind, path[:depth]) is None), len(path))


def _allowed(kind: type[BaseModel], path: list[str]) -> str:
    """The range of a numeric key, such as `> 0 and ≤ 1`."""
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
    """The table at `path` inside `kind`."""
    for part in path:
        inner = kind.model_fields[part].annotation if part in kind.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return None
        kind = inner
    return kind
