"""The phases of a round, as named spans that a profiler sees, or a clock; without either they cost next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from torch.autograd import profiler
from torch.profiler import record_function

PHASES = ("clients", "guard", "sums", "update", "evaluation", "writing")


_PREFIX = "fedrts: "


Item = TypeVar("Item")


Clock = Callable[[str, float], None]
"""Told of each phase that is over, and how many seconds it took."""


_clocks: list[Clock] = []


def phase(name: str) -> AbstractContextManager[object]:
    """Attribute the block to the phase `name`."""
    assert name in PHASES
    seen: AbstractContextManager[object] = record_function(span(name)) if profiler._is_profiler_enabled else nullcontext()
    return _clocked(name, seen) if _clocks else seen


@contextmanager
def _clocked(name: str, seen: AbstractContextManager[object]) -> Iterator[None]:
    started = time.perf_counter()
    try:
        with seen:
            yield
    finally:
        for clock in _clocks:
            clock(name, time.perf_counter() - started)


@contextmanager
def timed(clock: Clock) -> Iterator[None]:
    """Report to a clock all phases of this process that end during the block."""
    _clocks.append(clock)
    try:
        yield
    finally:
        _clocks.remove(clock)


def each(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """Yield `items`; waiting for them belongs to the phase `name`."""
    iterator = iter(items)
    while True:
        with phase(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def span(name: str) -> str:
    """Return the name of a phase in a trace."""
    return _PREFIX + name
