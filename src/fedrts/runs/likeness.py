"""Digests of the user's functions and objects, so that a run continues only with the same ones."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_DEEPEST = 8
"""Objects inside objects that are looked at; they may go in circles."""


_STABLE = ("builtins", "fedrts", "torch")
"""Packages whose functions are known by their names: another version of them is not another function."""


def likeness(thing: object) -> str:
    """Return a digest of what `thing` does, as far as can be told: equal for equal code and values, whatever surrounds them.

    It begins with the version of Python, on which compiled code depends.
    """
    version = "{}.{}".format(*sys.version_info)
    return f"{version} {hashlib.blake2b(json.dumps(_described(thing, 0)).encode(), digest_size=8).hexdigest()}"


def alike(then: str, now: str) -> bool:
    """Whether these digests describe the same thing; undecidable across versions of Python."""
    return then == now or then.partition(" ")[0] != now.partition(" ")[0]


def _described(thing: Any, depth: int) -> Any:
    """Describe what a thing is made of, as plain lists and texts."""
    if thing is None or isinstance(thing, bool | int | float | str | bytes | complex):
        return repr(thing)
    if depth == _DEEPEST:
        return type(thing).__qualname__
    if isinstance(thing, type | FunctionType | BuiltinFunctionType) and str(thing.__module__).partition(".")[0] in _STABLE:
        return f"{thing.__module__}.{thing.__qualname__}"
    parts: list[Any]
    if isinstance(thing, type):
        parts = [thing.__qualname__, thing.__bases__, [part for part in vars(thing).values() if isinstance(part, FunctionType)]]
    elif isinstance(thing, FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        parts = [thing.__qualname__, thing.__code__, thing.__defaults__, thing.__kwdefaults__, cells]
    elif isinstance(thing, CodeType):
        parts = [thing.co_code.hex(), thing.co_names, thing.co_consts]
    elif isinstance(thing, MethodType):
        parts = [thing.__func__, thing.__self__]
    elif isinstance(thing, functools.partial):
        parts = [thing.func, thing.args, thing.keywords]
    elif isinstance(thing, Tensor):
        parts = [str(thing.dtype), thing.tolist()]
    elif isinstance(thing, nn.Module):
        settings = {
            name: value for name, value in vars(thing).items() if name != "training" and isinstance(value, bool | int | float | str)
        }
        parts = [type(thing), repr(thing), settings, thing.state_dict()]
    elif isinstance(thing, Mapping):
        parts = [[key, value] for key, value in thing.items()]
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    else:
        parts = [getattr(thing, "__qualname__", None), type(thing), getattr(thing, "__dict__", None)]
    return [_described(part, depth + 1) for part in parts]
