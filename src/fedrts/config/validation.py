"""Mistakes in settings, each as one line that names the key and the allowed values."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedrts.config.tree import Tree, flat
from fedrts.errors import InputError, nearest
from fedrts.tables import explained

Model = TypeVar("Model", bound=BaseModel)
_MOST = 2**31
"""What whole numbers stay below: nobody means more, and nothing would come of it."""


def validated(kind: type[Model], settings: Tree, prefix: str = "") -> Model:
    """Build `kind` from `settings`; the first mistake is an InputError that names the key and the allowed values."""
    try:
        found = kind.model_validate(settings)
    except ValidationError as error:
        raise InputError(explained(error, kind, prefix)) from error
    for key, value in flat(found.model_dump()).items():
        if type(value) is int and value >= _MOST and key.rpartition(".")[2] != "seed":
            raise InputError(f"{prefix}{key} must be a whole number below {_MOST:,} (got {value})")
    return found


def check_options(table: str, options: Tree, function: Any, own: Iterable[str], extra: set[str]) -> None:
    """Check that `options` are keyword arguments of `function` (except `own`, which we pass) or among `extra`."""
    parameters = inspect.signature(function).parameters
    known = (set(parameters) - set(own)) | extra
    for key in options:
        if key not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise InputError(f"unknown key '{table}.{key}'{nearest(key, known, f'{table}.')}")
    if not isinstance(options.get("prune_output", False), bool):
        raise InputError(f"{table}.prune_output must be true or false (got {options['prune_output']!r})")
