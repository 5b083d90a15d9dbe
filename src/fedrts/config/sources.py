"""Sources of settings: keywords and flags, objects, `--set`, files."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedrts import methods
from fedrts.config.tree import Tree, merged
from fedrts.errors import InputError
from fedrts.files import require_plain
from fedrts.methods.base import Method
from fedrts.server.guard import Guard

SHORT = {
    "clients": ("clients", "total"),
    "per_round": ("clients", "per_round"),
    "dropout": ("clients", "dropout"),
    "epochs": ("train", "epochs"),
    "batch_size": ("train", "batch_size"),
    "lr": ("train", "lr"),
    "engine": ("engine", "name"),
    "precision": ("engine", "precision"),
    "value_type": ("wire", "value_type"),
}
"""Flags and keywords that stand for a key inside a table."""


def from_keywords(keywords: Tree) -> dict[str, Any]:
    """Return settings from flat keywords (`lr=0.1`, `clients=20`) and whole tables (`train={"lr": 0.1}`); None means not given."""
    settings: dict[str, Any] = {}
    for name, value in keywords.items():
        if value is None:
            continue
        value = str(value) if isinstance(value, Path) else plain(value)
        if name in SHORT and not isinstance(value, Mapping):
            table, entry = SHORT[name]
            whole = keywords.get(table)
            if isinstance(whole, Mapping) and whole.get(entry) is not None:
                raise InputError(f"{table}.{entry} is given twice, as {name}={value!r} and in {table}={{…}}: say it once")
            settings = merged(settings, {table: {entry: value}})
        else:
            settings = merged(settings, {name: value})
    return settings


def plain(value: Any) -> Any:
    """Convert NumPy and PyTorch numbers in a setting to Python's own."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value.item() if getattr(value, "ndim", None) == 0 else value


def from_method(method: Method | str | None, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that name a method and recreate this very object; `keywords` must not contradict them."""
    if isinstance(method, type):
        raise InputError(f"method is the class {method.__name__}: give an object, {method.__name__}(density=…), or the method's name")
    if not isinstance(method, Method):
        return {"method": method}, {}
    kind = type(method)
    name = next((name for name in methods.names() if methods.get(name) is kind), f"{kind.__module__}:{kind.__qualname__}")
    own = method.model_dump(exclude_unset=True)
    density = {"density": own.pop("density")} if "density" in own else {}
    made = {**density, "method_options": own}
    if twice := next((key for key in made if keywords.get(key) is not None), None):
        raise InputError(f"{twice} is given twice: the method is an object, so say it there alone")
    return {"method": name}, made


def from_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Parse `table.key=value` texts; values are TOML values, bare words are strings."""
    settings: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise InputError(f"--set takes table.key=value, not '{assignment}'")
        try:
            value: Any = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        for part in reversed(path.strip().split(".")):
            value = {part: value}
        settings = merged(settings, expanded(value))
    return settings


def expanded(layer: Tree) -> dict[str, Any]:
    """Expand `engine = "serial"` and `guard = "robust"` into tables, so that they merge with tables."""
    words: dict[str, Callable[[str], Tree]] = {"engine": lambda name: {"name": name}, "guard": Guard.preset}
    return {key: words[key](value) if key in words and isinstance(value, str) else value for key, value in layer.items()}


def from_file(path: str | Path) -> dict[str, Any]:
    """Read the settings of an experiment file."""
    if not isinstance(path, str | Path):
        raise InputError(f"an experiment file is named by its path (got {path!r}): settings are keywords, fedrts.run(**settings)")
    require_plain(path)
    try:
        text = Path(path).read_text("utf-8-sig")  # some editors write a mark before the first character
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the experiment file '{path}': {getattr(error, 'strerror', None) or error}") from error
    settings = parsed_toml(text, path)
    return written_out(settings)


def written_out(settings: dict[str, Any]) -> dict[str, Any]:
    """Complete the settings of a run's file: it says which versions wrote it, and before recipes existed it meant the paper's."""
    if settings.pop("versions", None) is not None:
        settings.setdefault("recipe", "paper")
    return settings


def parsed_toml(text: str, origin: str | Path) -> dict[str, Any]:
    """Parse the tables of a TOML text."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"'{origin}' is no valid TOML: {error}") from error
