"""Metrics: how a model is judged. Each is declared once, with its words, its format and its direction.

One's own is a function of all outputs and targets of a test set:

    @metric("Dice coefficient", lower_is_better=False, format="percent")
    def dice(output: Tensor, target: Tensor) -> float: ...

`eval.metrics = ["my_module:dice"]` adds it to an experiment, `fedrts.train(metrics=[dice])` to a script. `register(dice)` gives it a name.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from fedrts.errors import InputError
from fedrts.registry import Registry
from fedrts.tasks.measures import (
    AllRows,
    Explained,
    Judgement,
    MacroF1,
    MeanError,
    Meter,
    MicroF1,
    RightAnswers,
    area_under_roc,
)

MetricFormat = Literal["number", "percent"]
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_DERIVED = re.compile(r"^(valid|best|expected|average)_|_last10$")
TAKEN = {
    *("round", "outer", "clients", "rejected", "density", "links_changed", "upload_bytes", "download_bytes", "flops", "seconds"),
    *("federated", "metrics", "method", "data", "model", "seed", "rounds", "density_target", "comm_ratio", "paper_comm_mb"),
    *("samples_per_second", "rejected_replies", "version", "given", "digests", "cell", "client", "samples", "stopped", "restored"),
}
"""Keys of a run's lines and of its summary that are no metrics."""


@dataclass(frozen=True)
class Metric:
    """The declaration of a metric, and how it is measured.

    `Metric("dice", "Dice coefficient", lower_is_better=False, format="percent", meter=DiceMeter)`
    """

    name: str
    """Its key in history.jsonl and summary.json."""
    label: str
    """A few words for tables and charts."""
    lower_is_better: bool
    format: MetricFormat = "number"
    """percent: a share, from 0 to 1."""
    meter: Callable[[], Meter] | None = None
    """None: only a task's `evaluate` can give it."""
    words: str = ""
    """What the number in a summary is, where the label does not say all."""
    decimals: int | None = None
    """None: four of a share, otherwise four significant digits."""
    followed: bool = True
    """Does a run keep it in every line, its mean of the last ten rounds, its best value and that on the validation split?"""
    told: bool = True
    """Is it said where there is room for a few numbers?"""
    leads_reports: bool = False
    """In a report it takes the place of the metric that leads its task, and has the charts to itself."""

    def __post_init__(self) -> None:
        if not may_be_named(self.name):
            raise InputError(
                f"a metric cannot have the name '{self.name}': choose letters, digits and _, and no other key of a run's files"
            )

    def __call__(self) -> Meter:
        """Return a new meter."""
        if self.meter is None:
            raise InputError(f"the metric '{self.name}' cannot be added to a task: only one whose evaluate gives it has it")
        return self.meter()

    @property
    def title(self) -> str:
        return self.label[:1].upper() + self.label[1:]

    def text(self, value: float, *, signed: bool = False, decimals: int | None = None) -> str:
        """Format a value with digits that suit the metric."""
        sign, share = "+" if signed else "", self.format == "percent"
        places = 4 if share and self.decimals is None else self.decimals
        if places is None:
            return f"{value:{sign}.4g}"
        fixed = f"{value:{sign}.{places if decimals is None else decimals}f}"
        unreadable = not share and (abs(value) >= 1e5 or (value != 0 and float(fixed) == 0))
        return f"{value:{sign}.4g}" if unreadable else fixed

    def impossible(self, value: float) -> str | None:
        """Return why a value is impossible; None if it is possible."""
        if self.format != "percent" or 0 <= value <= 1:
            return None
        article = "an" if re.match(r"[aeiouAEIOU]|[FHLMNRSX](?![a-z])", self.label) else "a"
        return f"{article} {self.label} of {value:.3g}"

    def as_dict(self) -> dict[str, Any]:
        """Return what a summary says about it, for readers without its code."""
        return {"label": self.label, "format": self.format, "lower_is_better": self.lower_is_better}


def may_be_named(name: str) -> bool:
    """Whether a metric can have this name: it must be a word, and not another key's."""
    return bool(_NAME.fullmatch(name)) and name not in TAKEN and not _DERIVED.search(name)


metrics: Registry[Metric] = Registry("metric", type=Metric)
names = metrics.names
get = metrics.get


def register(metric: Metric) -> Metric:
    """Make a metric available under its name."""
    return metrics.register(metric.name)(metric)


def metric(label: str, *, lower_is_better: bool, format: MetricFormat = "number") -> Callable[[Judgement], Metric]:
    """Decorator: a metric of a function of all outputs and targets, named as the function is.

    Both are kept on the CPU until the last batch, so it costs as much memory as all outputs of the test set. Where that is too much,
    give a `Metric` a meter that adds up.
    """

    def made(function: Judgement) -> Metric:
        return Metric(function.__name__, label, lower_is_better, format, partial(AllRows, function))

    return made


_OVER_TOKENS = "perplexity over all tokens"

ACCURACY = register(Metric("accuracy", "accuracy", False, "percent", RightAnswers))
PERPLEXITY = register(
    Metric("perplexity", "perplexity", True, words="perplexity, mean over stories", decimals=2, followed=False, leads_reports=True)
)
LOSS = register(Metric("loss", "loss", True, words="test loss", decimals=4, followed=False, told=False))
PERPLEXITY_CORPUS = register(Metric("perplexity_corpus", _OVER_TOKENS, True, words=_OVER_TOKENS, decimals=2, followed=False, told=False))
_EARLIER = (ACCURACY, PERPLEXITY, LOSS, PERPLEXITY_CORPUS)
"""Those of runs whose summaries say nothing of their metrics, the leading one first."""

register(Metric("mae", "mean absolute error", True, meter=partial(MeanError, torch.abs)))
register(Metric("mse", "mean squared error", True, meter=partial(MeanError, torch.square)))
register(Metric("rmse", "root mean squared error", True, meter=partial(MeanError, torch.square, math.sqrt)))
register(Metric("r2", "R²", False, meter=Explained))
register(Metric("f1", "F1", False, "percent", MacroF1))
register(Metric("f1_micro", "micro F1", False, "percent", MicroF1))
register(Metric("auroc", "AUROC", False, "percent", partial(AllRows, area_under_roc)))


def addable() -> list[str]:
    """Return the names of metrics that can be added to a task's own."""
    return [name for name in names() if get(name).meter is not None]


def declaration(entry: object) -> Metric:
    """Return the metric of a name or an import path, or the metric itself."""
    if isinstance(entry, Metric):
        return entry
    if isinstance(entry, str):
        return get(entry)
    if isinstance(entry, Meter) and not isinstance(entry, type):
        return _of_object(entry)
    raise InputError(
        f"{getattr(entry, '__name__', entry)!r} is no metric: give a name ({', '.join(addable())}), a fedrts.tasks.metrics.Metric, or a "
        "function under @fedrts.tasks.metrics.metric(…), which says whether more of it is better"
    )


def _of_object(meter: Meter) -> Metric:
    """Return the metric of an object with update and compute, as in torchmetrics; every test set gets a copy."""
    better = getattr(meter, "higher_is_better", None)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(meter).__name__).lower()
    if not isinstance(better, bool):
        raise InputError(
            f"the metric {type(meter).__name__} does not say which direction is better: give it an attribute higher_is_better, or wrap "
            f"its class in fedrts.tasks.metrics.Metric('{name}', …, lower_is_better=…, meter={type(meter).__name__})"
        )
    return Metric(name, name.replace("_", " "), lower_is_better=not better, meter=partial(copy.deepcopy, meter))


def known(name: str) -> Metric:
    """Return the registered metric of a name, otherwise a plain number for which higher is better; follows no import path."""
    return get(name) if name in names() else Metric(name, name, lower_is_better=False)


def leading(declared: Sequence[Metric]) -> Metric:
    """Return the leading metric of a task: its first metric other than the loss, or else the loss."""
    return next((metric for metric in declared if metric.name != LOSS.name), LOSS)


def described(declared: Sequence[Metric], found: Iterable[str]) -> tuple[Metric, ...]:
    """Return the declared metrics, and those that an evaluation gave as well."""
    own = {metric.name for metric in declared}
    return (*declared, *(known(name) for name in found if name not in own and may_be_named(name)))


def followed(declared: Sequence[Metric]) -> list[Metric]:
    """Return the metrics of which a run keeps more than the last value; always includes the leading one."""
    first = leading(declared)
    return [metric for metric in declared if metric.followed or metric is first]


def told_of(declared: Sequence[Metric]) -> dict[str, dict[str, Any]]:
    """Return `metrics` of a summary, the leading one first; empty if they are what earlier versions wrote too."""
    first = leading(declared)
    if first.name == ACCURACY.name and {metric.name for metric in declared} <= {metric.name for metric in _EARLIER}:
        return {}
    return {metric.name: metric.as_dict() for metric in (first, *(metric for metric in declared if metric is not first))}


def of_run(summary: Mapping[str, Any] | None, history: Sequence[Mapping[str, Any]] = ()) -> list[Metric]:
    """Return the metrics of a run folder, the leading one first: those in its summary, otherwise those that have a value.

    Runs none of its code: what is not registered here is what the summary says, or a plain number.
    """
    if told := (summary or {}).get("metrics"):
        return [get(name) if name in names() else Metric(name, **entry) for name, entry in told.items()]
    valued = {key for line in (*history, summary or {}) for key, value in line.items() if isinstance(value, int | float)}
    *first, loss, corpus = _EARLIER
    others = dict.fromkeys(key for line in history for key in line if key in valued and may_be_named(key) and known(key) not in _EARLIER)
    candidates = [*first, *map(known, others), loss, corpus]
    return [metric for metric in candidates if {metric.name, f"{metric.name}_last10"} & valued] or [candidates[0]]
