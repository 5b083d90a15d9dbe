"""Models by name: plain modules. A new one needs only a function registered with `@register("name")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedrts.registry import Registry

if TYPE_CHECKING:
    from torch import nn

Builder = Callable[..., "nn.Module"]
"""(input_shape, classes, **options) → module. One whose weights were trained already has an attribute `pretrained` that is true."""

models: Registry[Builder] = Registry("model", __name__)
register = models.register
names = models.names
get = models.get


def absolute(name: str) -> str:
    """Make the path of `hf:PATH` absolute, so that the name means the same everywhere."""
    return models.absolute(name, "--model")
