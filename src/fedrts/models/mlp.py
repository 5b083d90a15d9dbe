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
    if isinstance(hidden, str) or not isinstance(hidden, Sequence) or not all(isinstance(width, int) and width >= 1 for width in hidden):
        raise InputError(f"model_options.hidden must be a list of widths of at least 1, such as [256, 256] (got {hidden!r})")
    widths = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))
