"""The number of threads that suits a piece of work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORTH_THREADS = 1e8
"""Multiply-accumulates of a forward pass from which on several threads pay.

Below, they meet so often that beside other work they mostly wait. At 7e7 two threads that spin as long as is the default save 10 to 22 % of
the time alone; beside a busy loop per core two take 1.6 times as long as one if they spin briefly, and 6 times with ten times the spins.
"""


@contextmanager
def threads_for(macs: float) -> Iterator[None]:
    """Return 1 for small work, which gains nothing from a second thread and loses much on busy cores; otherwise all of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if macs < WORTH_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
