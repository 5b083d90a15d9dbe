"""Training mode and evaluation mode of a module, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def training(module: nn.Module, wanted: bool = True) -> Iterator[None]:
    """The module in training mode, or without it in evaluation mode; then as it was."""
    before = module.training
    module.train(wanted)
    try:
        yield
    finally:
        module.train(before)
