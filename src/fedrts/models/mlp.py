"""A multilayer perceptron on flattened input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fedrts.errors import InputError
from fedrts.models import register


@register("mlp")
def mlp(input_shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (256, 256)) -> nn.Module:
    """Fully connected layers with ReLU; `hidden` gives the widths between input and output."""
    if min(hidden, default=1) < 1:
        raise InputError(f"model_options.hidden must be widths of at least 1 (got {list(hidden)})")
    widths = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))
