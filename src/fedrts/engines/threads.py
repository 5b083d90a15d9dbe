"""How many threads a piece of work is worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORTH_THREADS = 1e8
"""Multiply-accumulates of a forward pass from which on several threads pay.

Below, they meet so often that beside other work they mostly wait: at 7e7 two win a fifth of the time alone, and lose three times it there.
"""


@contextmanager
def threads_for(macs: float) -> Iterator[None]:
    """One thread for small work, which gains nothing from a second one and loses much where cores are busy; else as many as there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if macs < WORTH_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
