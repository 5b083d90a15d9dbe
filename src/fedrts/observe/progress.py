"""The progress of a run, as text for a terminal, a log or a notebook."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedrts.tasks.metrics import ACCURACY, Metric

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.server.rounds import Record

_RECENT = 10
"""Rounds whose pace foretells the rest."""


@dataclass
class Progress:
    """A run so far."""

    clock: Callable[[], float] = time.monotonic
    rounds: int = 0
    done: int = 0
    bytes: int = 0
    metric: Metric = ACCURACY
    """What the run is judged by."""
    value: float | None = None
    density: float = 1.0
    changed: float = 0.0
    rejected: int = 0
    judged: tuple[int, int] | None = None
    """After the last round: samples that the final model was judged on, and all that it will be."""
    _began: float = 0.0
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT + 1))

    def start(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None:
        self.rounds, self.done = experiment.rounds, first_round
        self.bytes, self.rejected, self.density = facts["bytes"], facts["missing"], facts["density"]
        self.metric = facts.get("metric", ACCURACY)
        self._began = self.clock()
        self._ends.append(self._began)

    def play(self, record: Record) -> None:
        self.done = record.round + 1
        self.bytes += record.upload_bytes + record.download_bytes
        value = record.value(self.metric)
        self.value = self.value if value is None else value
        self.changed = record.links_changed if record.outer else self.changed
        self.density = record.density
        self.rejected += len(record.rejected)
        if record.round < 0:
            self._ends.clear()  # a set-up is no round: its time foretells nothing
        self._ends.append(self.clock())

    def judge(self, done: int, total: int) -> None:
        if self.judged is None or done == 0:
            self._ends.clear()
            self._ends.append(self.clock())
        self.judged = (done, total)

    def finish(self) -> None:
        self.judged = None

    @property
    def share(self) -> float:
        """The share of finished rounds or, at the end, of evaluated samples."""
        done, total = self.judged or (self.done, self.rounds)
        return done / max(total, 1)

    @property
    def seconds_left(self) -> float | None:
        """The remaining seconds at the pace of the last rounds, or of the evaluation so far; None before there is one."""
        now = self.clock()
        if self.judged is not None:
            return (now - self._ends[0]) * (1 - self.share) / self.share if self.share else None
        if len(self._ends) < 2:
            return None
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(0.0, pace * (self.rounds - self.done) - (now - self._ends[-1]))

    @property
    def where(self) -> str:
        """`12/50`, or `judging 40%`."""
        return f"{self.done}/{self.rounds}" if self.judged is None else f"judging {self.share:.0%}"

    @property
    def left(self) -> str:
        """The text `0:00:20 left` or, at the end, the time taken."""
        if self.judged is None and self.done >= self.rounds:
            return f"{duration(self.clock() - self._began)} in all"
        return f"{duration(self.seconds_left)} left"

    @property
    def status(self) -> dict[str, str]:
        """The parts of the status text, in order."""
        return {
            "metric": f"{self.metric.name} {'-' if self.value is None else self.metric.text(self.value, decimals=3)}",
            "density": f"density {self.density:.3f}",
            "changed": f"{self.changed:.1%} links changed",
            "sent": f"{megabytes(self.bytes)} sent",
            **({"missing": f"{self.rejected} replies missing"} if self.rejected else {}),
        }

    def fitting(self, width: int) -> list[str]:
        """Return the parts of a progress line that fit `width` columns when joined by ` · `; the least important go first."""
        parts = {"where": self.where, **self.status, "left": self.left}
        for least in ("changed", "density", "missing", "sent", "left", "metric"):
            if sum(map(len, parts.values())) + 3 * (len(parts) - 1) <= width:
                break
            parts.pop(least, None)
        return list(parts.values())


def duration(seconds: float | None) -> str:
    """Format seconds as `0:03:20`; dashes if unknown."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def megabytes(count: float) -> str:
    """Format bytes for people: MB = 10^6."""
    return f"{count / 1e6:,.2f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"
