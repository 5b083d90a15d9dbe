"""The loader contract: arrays that are resident once; a client is a list of row numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedrts.tasks import Classification, Task


@dataclass(frozen=True)
class Data:
    """A data set: rows of `x` with targets `y`, and a test set of the same kind."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    """Number of labels (vocabulary size for language)."""
    task: Task = field(default_factory=Classification)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def to(self, device: torch.device | str) -> Data:
        x, y, test_x, test_y = (tensor.to(device) for tensor in (self.x, self.y, self.test_x, self.test_y))
        return Data(x, y, test_x, test_y, self.classes, self.task)


@dataclass(frozen=True)
class Recipe:
    """The defaults that go with a data set: a model and the settings under which it learns."""

    model: str = "mlp"
    settings: Mapping[str, Any] = field(default_factory=dict)
