"""How everything here is timed: whole rounds, the first ones as warm-up, until there are enough; PyTorch alone."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Laps:
    """Times of rounds; a round is over when the device has done its work."""

    device: str
    warm_up: int = 3
    least: int = 5
    """Rounds that are timed at least."""
    seconds: float = 10.0
    """Time after which no more rounds are needed."""
    most: int = 300
    times: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    _last: float = 0.0
    _warm: float = 0.0
    _seen: int = 0

    def start(self) -> None:
        """Just before the first round."""
        self._last = self._now()

    def lap(self, samples: int) -> bool:
        """A round on so many samples is over. Are these enough?"""
        now = self._now()
        self._seen += 1
        if self._seen <= self.warm_up:
            self._warm = now
        else:
            self.times.append(now - self._last)
            self.samples.append(samples)
        self._last = now
        timed = len(self.times)
        return timed >= self.most or (timed >= self.least and now - self._warm >= self.seconds)

    def result(self) -> dict[str, Any]:
        """What a table shows, and the raw times."""
        if not self.times:
            return {"error": "stopped before a round was timed"}
        memory = torch.cuda.max_memory_reserved() if self.device.startswith("cuda") else None
        return {**self.summed_up(self.times, self.samples), "device_memory": memory}

    @staticmethod
    def summed_up(times: list[float], samples: list[int]) -> dict[str, Any]:
        """Summarise rounds that took `times` seconds for `samples` samples."""
        return {
            "samples_per_second": statistics.median(count / time for count, time in zip(samples, times, strict=True)),
            "mean_samples_per_second": sum(samples) / sum(times),
            "round_seconds": statistics.median(times),
            "rounds": len(times),
            "times": [round(time, 6) for time in times],
            "samples": samples,
        }

    def _now(self) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()


def exactly_float32() -> None:
    """No TF32 anywhere."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def say(result: dict[str, Any]) -> None:
    """The one line that a driver prints on stdout."""
    print(json.dumps(result), flush=True)


def not_installed(name: str, error: ImportError) -> None:
    """Say so, with the remedy, and end."""
    say({"missing": f"not installed: pip install -r benchmarks/rivals/requirements-{name}.txt", "reason": str(error)})
    sys.exit(0)
