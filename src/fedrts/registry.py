"""Registries of named choices (methods, models, reducers); users add their own by registration or import path.

Whoever names an import path has its code run, so settings of somebody else are read inside `only_allowing`:

    with only_allowing(["my_package.nets:net"]):
        config.resolve(settings_of_a_stranger)  # an InputError if they name any other code
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from fedrts.errors import InputError, nearest, printable, reason

T = TypeVar("T")
IMPORT_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
"""What may be one: `pkg.module:name`."""


_PATH = "PATH"


@dataclass(frozen=True)
class _Policy:
    """What may be loaded at the moment."""

    allowed: Collection[str]
    own: Collection[tuple[str, str]]
    remedy: Callable[[str], str]

    def check(self, path: str, kind: str) -> None:
        if path not in self.allowed and (kind, path) not in self.own:
            raise InputError(
                f"the {kind} '{printable(path)}' is not part of fedrts and may run any code: {printable(self.remedy(path), 1000)}"
            )


_policies: ContextVar[tuple[_Policy, ...]] = ContextVar("policies", default=())
"""All that hold now: a nested one can only narrow. None hold by default, for what the user says is the user's own."""


@contextlib.contextmanager
def only_allowing(
    allowed: Collection[str], remedy: Callable[[str], str] = "say --allow {} if you trust it".format, own: Collection[tuple[str, str]] = ()
) -> Iterator[None]:
    """Inside, an import path that is not `allowed` is an `InputError` that ends with the `remedy` for it.

    `own` are pairs of a kind and a path that is allowed for things of this kind alone. Threads that are started inside are not bound.
    """
    token = _policies.set((*_policies.get(), _Policy(allowed, own, remedy)))
    try:
        yield
    finally:
        _policies.reset(token)


def permit(path: str, kind: str) -> None:
    """Raise an `InputError` if something that may run foreign code is not allowed now."""
    for policy in _policies.get():
        policy.check(path, kind)


class Registry(Generic[T]):
    """Things of one kind by name. The modules of a `package` are imported on first use, so that a new file there is enough.

    With a `base`, all of them are its subclasses; with a `type`, its objects. A function under a name such as `npz:PATH` stands for all
    that begins with `npz:`, and is told the path first.
    """

    def __init__(self, kind: str, package: str | None = None, base: type | None = None, type: type | None = None) -> None:
        self.kind = kind
        self._package = package
        self._base = base
        self._type = type
        self._known: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Register a class or function under `name` (decorator)."""

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
        """Return the object of that name, or of an import path `pkg.module:name`."""
        self._load()
        if self.is_path(name):
            return self._at_path(*name.split(":", 1))
        if name in self._known:
            return self._known[name]
        if ":" in name:
            return cast(T, self._checked(name, import_path(name, self.kind)))
        raise InputError(f"there is no {self.kind} '{name}'{nearest(name, self._known)}")

    def is_path(self, name: str) -> bool:
        """Whether the name, such as `npz:FILE`, belongs to an entry registered as `npz:PATH`."""
        scheme, colon, _ = name.partition(":")
        return bool(colon) and f"{scheme}:{_PATH}" in self.names()

    def paths(self) -> tuple[str, ...]:
        """Return the prefixes of names with a path: `npz:` and the like."""
        return tuple(name.removesuffix(_PATH) for name in self.names() if name.endswith(f":{_PATH}"))

    def absolute(self, name: str, flag: str) -> str:
        """Make the path in a name, if any, absolute, so that the name means the same everywhere."""
        if not self.is_path(name):
            return name
        scheme, _, path = name.partition(":")
        if not path:
            raise InputError(f"{flag} {name} names no path: give {scheme}:{_PATH}")
        return f"{scheme}:{os.path.abspath(os.path.expanduser(path))}"

    def _at_path(self, scheme: str, path: str) -> T:
        found: Any = self._known[f"{scheme}:{_PATH}"]
        bound = functools.partial(found, Path(path))
        vars(bound).update(vars(found), __doc__=found.__doc__, __module__=found.__module__)
        return cast(T, bound)

    def _checked(self, name: str, found: object) -> object:
        if self._base is not None and not (isinstance(found, type) and issubclass(found, self._base)):
            raise InputError(f"'{name}' is no {self.kind}: it must be a subclass of {_path(self._base)}")
        if self._type is not None and not isinstance(found, self._type):
            raise InputError(f"'{name}' is no {self.kind}: it must be a {_path(self._type)}")
        return found

    def _load(self) -> None:
        if self._package is not None:
            package = importlib.import_module(self._package)
            self._package = None
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{module.name}")


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class NotFoundError(InputError):
    """An import path that leads nowhere: no such module, or no such name in it."""


def import_path(path: str, kind: str) -> object:
    """Return the object at `pkg.module:name` if it is allowed now; modules of the current folder are found too."""
    permit(path, kind)
    module, _, name = path.partition(":")
    try:
        with _current_folder():
            imported = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's module raises, and SystemExit of one that was written as a script
        what = reason(error) if isinstance(error, Exception) else f"it raises {error!r}"
        missing = isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(f"{error.name}.")
        raise (NotFoundError if missing else InputError)(f"cannot import the {kind} '{path}': {what}") from error
    try:
        found: object = getattr(imported, name)
    except AttributeError as error:
        raise NotFoundError(f"cannot import the {kind} '{path}': {reason(error)}") from error
    if not callable(found):
        raise InputError(f"the {kind} '{path}' is {found!r}: it must be a function or a class")
    return found


def is_pythons_own(module: str) -> bool:
    """Whether a module comes with Python and is not shadowed by a file of the user's."""
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return False
    with _current_folder():
        spec = PathFinder.find_spec(top)
    return spec is None or spec.origin is None or Path(spec.origin).is_relative_to(sysconfig.get_path("stdlib"))


@contextlib.contextmanager
def _current_folder() -> Iterator[None]:
    """Make modules of the current folder importable during the block."""
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)
