"""Data that only sites hold: the coordinator knows the shape of inputs and the number of classes, and has no rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fedrts.data import register
from fedrts.data.contract import Data, Recipe
from fedrts.errors import InputError

_MOST = 2**28


@register("elsewhere", Recipe(settings={"clients": {"partition": "sites"}}))
def elsewhere(shape: Sequence[int] = (), classes: int = 0) -> Data:
    """Data of sites (`fedrts server`): `shape` of one input as a model reads it, such as [3, 32, 32], and the number of `classes`."""
    whole = all(type(side) is int and side >= 1 for side in shape) if isinstance(shape, list | tuple) else False
    if not whole or not shape or math.prod(shape) > _MOST:
        raise InputError(f"data_options.shape must be the sizes of one input, such as [3, 32, 32] (got {shape!r})")
    if type(classes) is not int or classes < 2:
        raise InputError(f"data_options.classes must be a whole number ≥ 2 (got {classes!r})")
    x, y = torch.zeros(2, *shape), torch.zeros(2, dtype=torch.int64)  # what a model may be tried on
    return Data(x, y, x[:0], y[:0], classes=classes)
