"""Temporary training or evaluation mode of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def training(module: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Put the module into training (or evaluation) mode during the block, then restore it."""
    before = module.training
    module.train(wanted)
    try:
        yield
    finally:
        module.train(before)
