"""When the topology may change, and by how much (methods of RigL; the paper's set-up)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Outer rounds every `interval` rounds before `end`; the adjusted fraction falls from `adjust` to 0 along a cosine."""

    interval: int = 10
    """ΔT."""
    end: int = 300
    """T_end: from here on the topology is fixed."""
    adjust: float = 0.4
    """α_adj."""
    first_outer: int = 0
    outer_at_end: bool = False
    """T_end may be an outer round too, the last one."""

    def is_outer(self, t: int) -> bool:
        return t % self.interval == 0 and self.first_outer <= t < self._stop

    def is_frozen(self, t: int) -> bool:
        """Has the topology changed for the last time before round t?"""
        return t >= self.end and not self.is_outer(t)

    def outers_before(self, t: int) -> int:
        """How many outer rounds there are before round t."""
        first = -(-self.first_outer // self.interval)
        return max(0, -(-min(t, self._stop) // self.interval) - first)

    @property
    def _stop(self) -> int:
        """The first round that can no longer be outer."""
        return self.end + self.outer_at_end

    def fraction(self, t: int) -> float:
        """f(t) = α_adj/2 · (1 + cos(πt/T_end)) before T_end, 0 from then on (the cosine would rise again)."""
        return self.adjust / 2 * (1 + math.cos(math.pi * t / self.end)) if 0 <= t < self.end else 0.0

    def quota(self, t: int, counts: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Q^l_t = min(⌊f(t)·K^l⌋, n^l − K^l): links of each layer up for exchange, never more than there are free places."""
        fraction = self.fraction(t)
        return tuple(min(math.floor(fraction * active), size - active) for active, size in zip(counts, sizes, strict=True))
