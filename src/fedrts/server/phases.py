"""The phases of a round, as named spans that a profiler sees; without one they cost next to nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from torch.autograd import profiler
from torch.profiler import record_function

PHASES = ("clients", "guard", "sums", "update", "evaluation", "writing")


_PREFIX = "fedrts: "


Item = TypeVar("Item")


def phase(name: str) -> AbstractContextManager[object]:
    """What happens inside belongs to the phase `name`."""
    assert name in PHASES
    return record_function(span(name)) if profiler._is_profiler_enabled else nullcontext()


def each(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """`items`; waiting for them belongs to the phase `name`."""
    iterator = iter(items)
    while True:
        with phase(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def span(name: str) -> str:
    """What a phase is called in a trace."""
    return _PREFIX + name
