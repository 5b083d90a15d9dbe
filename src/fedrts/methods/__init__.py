"""The methods, one short file each. A new one needs only a class registered with `@register("name")`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrts.registry import Registry

if TYPE_CHECKING:
    from fedrts.methods.base import Method

__all__ = ["DEFAULT", "get", "methods", "names", "register"]

DEFAULT = "fedrts"

methods: Registry[type[Method]] = Registry("method", __name__)
register = methods.register
names = methods.names
get = methods.get


def __getattr__(name: str) -> Any:
    """Return a registered class by its own name, as in `fedrts.methods.FedRTS`."""
    if not name.startswith("_"):
        for registered in names():
            if get(registered).__name__ == name:
                return get(registered)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what `fedrts.methods.<TAB>` offers, read from the files, because importing the classes imports torch."""
    registered = re.compile(r'^@register\("\w+"\)\n(?:@.*\n)*class (\w+)', re.M)
    files = Path(__file__).parent.glob("*.py")
    return sorted({*__all__, *(name for file in files for name in registered.findall(file.read_text("utf-8")))})
