"""When the topology may change, and by how much (methods of RigL; the paper's set-up)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedrts.sparse.arms import Layers
from fedrts.sparse.falling import Fall


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
    fall: Fall | None = None
    """How the density falls over the outer rounds, where it does."""

    def is_outer(self, t: int) -> bool:
        return t % self.interval == 0 and self.first_outer <= t < self._stop

    def is_frozen(self, t: int) -> bool:
        """Whether the topology has changed for the last time before round t."""
        return t >= self.end and not self.is_outer(t)

    def outers_before(self, t: int) -> int:
        """Return how many outer rounds there are before round t."""
        first = -(-self.first_outer // self.interval)
        return max(0, -(-min(t, self._stop) // self.interval) - first)

    @property
    def _stop(self) -> int:
        """The first round that can no longer be outer."""
        return self.end + self.outer_at_end

    def progress(self, t: int) -> float:
        """Return 0 at the first outer round, 1 at the last one before T_end, and 1 from then on."""
        first, last = -(-self.first_outer // self.interval) * self.interval, (self.end - 1) // self.interval * self.interval
        return min((t - first) / max(last - first, 1), 1.0)

    def targets(self, t: int, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the links of each layer after round t: as before, or fewer after an outer round of a falling density."""
        return tuple(counts) if self.fall is None or not self.is_outer(t) else self.fall.targets(self.progress(t), counts)

    def fraction(self, t: int) -> float:
        """f(t) = α_adj/2 · (1 + cos(πt/T_end)) before T_end, 0 from then on (the cosine would rise again)."""
        return self.adjust / 2 * (1 + math.cos(math.pi * t / self.end)) if 0 <= t < self.end else 0.0

    def quota(self, t: int, counts: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Q^l_t = min(⌊f(t)·K^l⌋, n^l − K^l): links of each layer up for exchange, never more than there are free places.

        Where the density falls, f(t) is a share of the links that stay. Grouped links are exchanged in whole arms.
        """
        fraction = self.fraction(t)
        layers = zip(counts, self.targets(t, counts), sizes, strict=True)
        return Layers.of(sizes).whole([min(math.floor(fraction * target), size - active) for active, target, size in layers])
