"""Who trains when: clients with unequal numbers of steps, placed into slots that run side by side."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A client's steps in a slot, `start` to `stop`."""

    client: int
    slot: int
    start: int
    stop: int


def schedule(steps: Sequence[int], slots: int) -> list[Turn]:
    """A turn for every client with steps to make: the longest first, each in the slot that is free the earliest."""
    free = [(0, slot) for slot in range(slots)]
    turns = []
    for client in sorted(range(len(steps)), key=lambda index: (-steps[index], index)):
        if steps[client]:
            start, slot = heapq.heappop(free)
            turns.append(Turn(client, slot, start, start + steps[client]))
            heapq.heappush(free, (start + steps[client], slot))
    return turns


def length(turns: Sequence[Turn]) -> int:
    """Steps until all turns are over."""
    return max((turn.stop for turn in turns), default=0)


def best_width(rounds: Sequence[Sequence[int]], most: int, overhead: float) -> int:
    """The number of slots, at most `most`, in which rounds of clients with so many steps are over the soonest.

    A step of k slots takes `overhead + k`: more slots share the overhead, fewer of them idle while the largest client trains.
    """
    times = {width: sum(length(schedule(steps, width)) for steps in rounds) * (overhead + width) for width in range(1, most + 1)}
    return min(times, key=lambda width: (times[width], -width))
