"""Scheduling clients with unequal numbers of steps into slots that run side by side."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Turn:
    """A client's steps in a slot, `start` to `stop`."""

    client: int
    slot: int
    start: int
    stop: int


def schedule(steps: Sequence[int], slots: int) -> list[Turn]:
    """A turn for every client with steps to make: the longest first, each in the slot that is free the earliest.

    Slots are numbered by when they end, the last first: those that are still busy are always the first ones.
    """
    free = [(0, slot) for slot in range(slots)]
    placed = []
    for client in sorted(range(len(steps)), key=lambda index: (-steps[index], index)):
        if steps[client]:
            start, slot = heapq.heappop(free)
            placed.append(Turn(client, slot, start, start + steps[client]))
            heapq.heappush(free, (start + steps[client], slot))
    ends = {slot: end for end, slot in free}
    number = {slot: place for place, slot in enumerate(sorted(ends, key=lambda slot: (-ends[slot], slot)))}
    return [replace(turn, slot=number[turn.slot]) for turn in placed]


def busy(turns: Sequence[Turn]) -> list[int]:
    """Return the number of busy slots in each step."""
    ends: dict[int, int] = {}
    for turn in turns:
        ends[turn.slot] = max(turn.stop, ends.get(turn.slot, 0))
    return [sum(end > step for end in ends.values()) for step in range(length(turns))]


def length(turns: Sequence[Turn]) -> int:
    """Return the number of steps until all turns are over."""
    return max((turn.stop for turn in turns), default=0)
