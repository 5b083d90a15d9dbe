"""Models by name: plain modules. A function registered with `@register("name")` is all that a new one needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedrts.registry import Registry

if TYPE_CHECKING:
    from torch import nn

Builder = Callable[..., "nn.Module"]
"""(input_shape, classes, **options) → module."""

models: Registry[Builder] = Registry("model", __name__)
register = models.register
names = models.names
get = models.get
