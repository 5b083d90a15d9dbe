"""Names for things that users choose: methods, models, data sets; one's own come by registration or import path."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar, cast

from fedrts.errors import InputError, nearest, reason

T = TypeVar("T")


class Registry(Generic[T]):
    """Things of one kind by name. The modules of `package` are imported on first use, so that a new file there is enough."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package: str | None = package
        self._known: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make a class or function available under `name`."""

        def add(thing: T) -> T:
            if name in self._known and self._known[name] is not thing:
                raise ValueError(f"there is a {self.kind} named '{name}' already")
            self._known[name] = thing
            return thing

        return add

    def names(self) -> list[str]:
        self._load()
        return sorted(self._known)

    def get(self, name: str) -> T:
        """The thing of that name, or what an import path `pkg.module:name` leads to."""
        self._load()
        if name in self._known:
            return self._known[name]
        if ":" in name:
            return cast(T, import_path(name, self.kind))
        raise InputError(f"there is no {self.kind} '{name}'{nearest(name, self._known)}")

    def _load(self) -> None:
        if self._package is not None:
            package = importlib.import_module(self._package)
            self._package = None
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{module.name}")


def import_path(path: str, kind: str) -> object:
    """The object at `pkg.module:name`; modules of the current folder are found too."""
    module, _, name = path.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        found: object = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a user's module raises
        raise InputError(f"cannot import the {kind} '{path}': {reason(error)}") from error
    finally:
        if added:
            sys.path.remove(here)
    if not callable(found):
        raise InputError(f"the {kind} '{path}' is {found!r}: it must be a function or a class")
    return found
