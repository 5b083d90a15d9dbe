"""Data sets by name. A function registered with `@register("name")` that returns `Data` is all that a new one needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedrts.registry import Registry

if TYPE_CHECKING:
    from fedrts.data.contract import Data, Recipe

Loader = Callable[..., "Data"]

DEFAULT = "digits"

data: Registry[Loader] = Registry("data set", __name__)
names = data.names
get = data.get


def register(name: str, recipe: Recipe | None = None) -> Callable[[Loader], Loader]:
    """Decorator for a loader, with the recipe of defaults that goes with the data set."""

    def add(loader: Loader) -> Loader:
        loader.recipe = recipe  # type: ignore[attr-defined]
        return data.register(name)(loader)

    return add


def recipe(name: str) -> Recipe:
    """The defaults that go with a data set; a plain `Recipe` where it brings none."""
    from fedrts.data.contract import Recipe

    found: Any = getattr(get(name), "recipe", None)
    return found or Recipe()
