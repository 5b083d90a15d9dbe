"""A multilayer perceptron for the rows of a table."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedrts.errors import InputError
from fedrts.models import register
from fedrts.models.mlp import mlp


@register("tabular")
def tabular(input_shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (128, 128)) -> nn.Module:
    """A multilayer perceptron on the columns of a table, narrower than `mlp`; `hidden` gives the widths between input and output."""
    if len(input_shape) != 1 or input_shape[0] < 1:
        raise InputError(f"model 'tabular' reads rows [columns], not inputs of shape {input_shape}: choose another --model")
    return mlp(input_shape, classes, hidden)
