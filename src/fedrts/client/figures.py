"""A few numbers of every client as words of a secure sum: its metrics, or its image statistics.

The server reads the mean over samples, and nothing else: not the mean over clients beside it, for two means with different weights
over few clients are as good as each one's number.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedrts.secure.ring import Ring, Words, rounded
from fedrts.secure.settings import SecureSums
from fedrts.sparse import random
from fedrts.tasks.metrics import Metric

_WORD = 32


@dataclass(frozen=True)
class FigureForm:
    """The words for one clipped number per name, summed over n clients.

    They are as wide as a word of 32 bits allows: o = 2^(b−1) − 1 with b = 32 − bits of n, so that 2·o·n < 2^b·n < 2^32.
    """

    clips: tuple[tuple[str, float], ...]
    clients: int

    @staticmethod
    def of_metrics(metrics: Sequence[Metric], table: SecureSums, clients: int) -> FigureForm:
        """Return the form for metrics; a share is at most 1."""
        clips = tuple((metric.name, 1.0 if metric.format == "percent" else table.metric_clip) for metric in metrics)
        return FigureForm(clips, clients)

    @staticmethod
    def of_channels(channels: int, clients: int) -> FigureForm:
        """Return the form for the means of this many channels and of their squares, in [0, 1]."""
        return FigureForm(tuple((f"{what} {channel}", 1.0) for what in ("mean", "square") for channel in range(channels)), clients)

    @property
    def ring(self) -> Ring:
        """The ring: one value per name, and one counter of the clients that have it."""
        count = len(self.clips)
        return Ring(self.clients, _WORD - self.clients.bit_length(), count, count)

    def digest(self, about: str) -> bytes:
        """Return the digest of what the words mean and what they are `about`."""
        return hashlib.sha256(repr((self.ring, self.clips, about)).encode()).digest()

    def words(self, numbers: Sequence[float], share: float, key: int) -> Words:
        """Return one client's words; its `share` is n_k / n_max. A NaN counts as missing; the sum hides whose it is."""
        known = np.isfinite(numbers)
        clips = np.array([clip for _, clip in self.clips])
        values = np.where(known, np.clip(np.nan_to_num(numbers) / clips, -1.0, 1.0), 0.0) * share
        return self.ring.encoded(rounded(values, self.ring.most, random.uniform_halves(key, len(values)).numpy()), known)

    def means(self, total: Words, clients: int, samples: int, most_samples: int) -> dict[str, float]:
        """Return means over samples by name; NaN where no client had a value."""
        levels, counts, _ = self.ring.decoded(total, clients)
        scale = most_samples / samples / self.ring.most
        known = [count == clients for count in counts.tolist()]
        means = [_within(level * scale, clients * scale) for level in levels.tolist()]
        return {name: mean * clip if is_known else math.nan for (name, clip), mean, is_known in zip(self.clips, means, known, strict=True)}


def _within(mean: float, rounding: float) -> float:
    """A mean in units of the clip: as large as 1 at most, but for what clients' `rounding` cannot have made of it."""
    return max(-1.0, min(mean, 1.0)) if abs(mean) <= 1 + rounding else mean
