"""Data sets by name. A new one needs only a function registered with `@register("name")` that returns `Data`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrts.errors import InputError, reason
from fedrts.registry import IMPORT_PATH, NotFoundError, Registry, is_pythons_own, permit

if TYPE_CHECKING:
    from fedrts.data.contract import Data, Recipe
    from fedrts.data.official import Source

Loader = Callable[..., "Data"]
"""(**options) → Data. A loader with an argument `folder` is told the folder of data sets."""

DEFAULT = "digits"
VARIABLE = "FEDRTS_DATA"
"""Names the folder of data sets where no --data-dir does."""

data: Registry[Loader] = Registry("data set", __name__)
names = data.names


def register(
    name: str, recipe: Recipe | Callable[[Path, Mapping[str, Any]], Recipe] | None = None, source: Source | None = None
) -> Callable[[Loader], Loader]:
    """Decorator for a loader, with the recipe of defaults that goes with the data set and where its files come from.

    A name such as `npz:PATH` stands for all that begins with `npz:`; the loader's first argument is then the path.
    """

    def add(loader: Loader) -> Loader:
        loader.recipe, loader.source = recipe, source  # type: ignore[attr-defined]
        return data.register(name)(loader)

    return add


def get(name: str) -> Loader:
    """Return the loader of a registered name, of `folder:PATH`, `csv:PATH` and the like, or of an import path `pkg.module:name`."""
    kind = Path(name).suffix[1:].lower()
    if ":" not in name and f"{kind}:" in data.paths():
        raise InputError(f"there is no data set '{name}': a file is read as {kind}:{name}")
    return _imported(name) if ":" in name and not data.is_path(name) else data.get(name)


def _imported(name: str) -> Loader:
    """Import a loader; a word that is not an import path was meant as a kind of file."""
    word = name.partition(":")[0]
    kinds = " or ".join(known for known in data.names() if known.endswith(":PATH"))
    ways = f"files are read as {kinds}, own code as PKG.MODULE:NAME; `fedrts data` lists what has a name"
    unknown = f"there is no kind of data '{word}:' as in '{name}'"
    may_be_code = bool(IMPORT_PATH.fullmatch(name))
    if may_be_code:
        permit(name, data.kind)
    if not may_be_code or is_pythons_own(word):
        raise InputError(f"{unknown}: {ways}")
    try:
        return data.get(name)
    except NotFoundError as error:
        raise InputError(f"{unknown}, nor such code ({reason(error.__cause__ or error)}): {ways}") from error


def absolute(name: str) -> str:
    """Make the path of `folder:PATH`, `npz:PATH` and the like absolute, so that the name means the same everywhere."""
    return data.absolute(name, "--data")


def recipe(name: str, options: Mapping[str, Any] | None = None) -> Recipe:
    """Return the defaults of a data set; a plain `Recipe` if it has none. A table's defaults depend on its columns."""
    from fedrts.data.contract import Recipe

    found: Any = getattr(get(name), "recipe", None)
    if callable(found):
        made: Recipe = found(Path(name.partition(":")[2]).expanduser(), options or {})
        return made
    return found or Recipe()


def source(name: str) -> Source | None:
    """Return the source of a data set's files; None if it needs none."""
    found: Source | None = getattr(get(name), "source", None)
    return found


def home(folder: str | Path | None = None) -> Path:
    """Return the folder of data sets: the given one, else `FEDRTS_DATA`, else ~/.cache/fedrts."""
    return Path(folder or os.environ.get(VARIABLE) or Path("~/.cache/fedrts")).expanduser()


def load(name: str, options: Mapping[str, Any] | None = None, folder: str | Path | None = None) -> Data:
    """The data set of that name. `validation`, an option of every one, is the share of training data kept for choosing a model."""
    from fedrts.data.contract import Data

    loader, keywords = get(name), dict(options or {})
    known = inspect.signature(loader).parameters
    share = 0.0 if "validation" in known else keywords.pop("validation", 0.0)
    if "folder" in known:
        keywords["folder"] = home(folder)
    held = loader(**keywords)
    if not isinstance(held, Data):
        raise InputError(f"the data set '{name}' must be a fedrts.data.contract.Data, not {type(held).__name__}")
    return held.with_validation(share)
