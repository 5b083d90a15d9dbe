"""Numbers of a summary that can be compared: their meaning, direction and format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedrts.errors import InputError, nearest
from fedrts.tasks import metrics
from fedrts.tasks.metrics import Metric


@dataclass(frozen=True)
class SummaryKey:
    """A number of summary.json: a metric in one of its forms, or a cost."""

    words: str
    lower_is_better: bool = True
    metric: Metric | None = None
    decimals: int = 2

    def text(self, value: float, signed: bool = False) -> str:
        """Format a value with suitable digits."""
        if self.metric is not None:
            return self.metric.text(value, signed=signed)
        sign = "+" if signed else ""
        return f"{value:{sign}.{self.decimals}f}" if self.decimals > 2 or abs(value) < 1e5 else f"{value:{sign}.4g}"


_CHOSEN = "chosen on the validation split where there is one, else on test data"
_COSTS = {
    "comm_ratio": SummaryKey("bytes sent, relative to dense averaging", decimals=4),
    "paper_comm_mb": SummaryKey("MB of one client in an outer round, in the paper's accounting"),
    "upload_bytes": SummaryKey("bytes sent to the server"),
    "download_bytes": SummaryKey("bytes sent by the server"),
    "flops": SummaryKey("FLOPs of all clients"),
    "seconds": SummaryKey("seconds"),
    "samples_per_second": SummaryKey("training samples a second", lower_is_better=False),
}


def comparable(more: Iterable[Metric] = ()) -> dict[str, SummaryKey]:
    """Return all keys by name: those of the registered metrics and of `more`, and the costs."""
    declared = {name: metrics.get(name) for name in metrics.names()} | {metric.name: metric for metric in more}
    return {key: entry for metric in declared.values() for key, entry in _forms(metric).items()} | _COSTS


def _forms(metric: Metric) -> dict[str, SummaryKey]:
    words = {
        metric.name: metric.words or f"test {metric.label} after the last round",
        f"{metric.name}_last10": f"test {metric.label}, mean of the last ten rounds",
        f"best_{metric.name}": f"test {metric.label} of the best round ({_CHOSEN})",
        f"average_{metric.name}": f"test {metric.label} of the average of late models",
    }
    return {key: SummaryKey(text, metric.lower_is_better, metric) for key, text in words.items()}


def summary_key(name: str, more: Iterable[Metric] = ()) -> SummaryKey:
    """Return the key of that name; an `InputError` suggests the nearest one if it is unknown."""
    known: Mapping[str, SummaryKey] = comparable(more)
    if name not in known:
        raise InputError(f"there is no metric '{name}'{nearest(name, known)}")
    return known[name]
