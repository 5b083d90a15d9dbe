"""Learning rates chosen on the validation split, by the same rule for every method and density, with their own seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedrts import config
from fedrts.comparison import ladder
from fedrts.comparison.grid import Cell, Group
from fedrts.errors import InputError
from fedrts.runs.folder import RunFolder
from fedrts.server.rounds import ALWAYS_EVALUATED
from fedrts.tasks.metrics import ACCURACY, Metric, of_run


@dataclass(frozen=True)
class Chosen:
    """The rates of a group of cells, the score of each on the validation split (None: the trial failed), and the chosen one."""

    name: str
    scores: Mapping[float, float | None]
    rate: float | None
    """The best, or one that was so when its first cell began; None: every trial failed."""
    metric: Metric = ACCURACY
    """What they were judged by."""
    auto: bool = False
    """Were they tried without being named?"""

    @property
    def is_best(self) -> bool:
        return self.rate == ladder.best(self.scores, self.metric.lower_is_better)

    @property
    def wider(self) -> float | None:
        """Return the next rate to try, beyond the end at which the best lies, unless all rates were named."""
        return ladder.wider(self.scores, self.metric.lower_is_better) if self.auto else None

    @property
    def remark(self) -> str | None:
        """Return a line if a better rate may lie beyond those tried."""
        edge = ladder.edge(self.scores, self.rate)
        if edge is None or not self.is_best:
            return None
        most = f"after {len(self.scores)} trials " if self.auto else ""
        remedy = f"start from it, with --lr {self.rate:g}" if self.auto else "use --tune-lr auto, or name more rates"
        return f"{self.name}: {most}the best learning rate, {self.rate:g}, is the {edge} tried; a better one may lie beyond: {remedy}"


def score(folder: Path) -> tuple[float | None, Metric | None]:
    """Return a finished run's mean of the leading metric over the last ten rounds, on the validation split, and that metric.

    None where one of these values is missing: it was not finite.
    """
    run = RunFolder(folder)
    summary = run.summary()
    if summary is None:
        return None, None
    metric = of_run(summary)[0]
    key = f"valid_{metric.name}"
    lines = run.history()[-ALWAYS_EVALUATED:]
    values = [line[key] for line in lines if line.get(key) is not None]
    return sum(values) / len(values) if values and len(values) == len(lines) else None, metric


def used(cells: Sequence[Cell], folder: Path) -> dict[Group, float]:
    """Return the rates of groups whose runs have begun: they stay, because a mean must cover runs of one rate."""
    found: dict[Group, tuple[str, float]] = {}
    for cell in cells:
        file = folder / cell.name / "experiment.toml"
        if not file.exists():
            continue
        with RunFolder(file.parent).trusted(config.foreign(cell.settings())):
            rate = config.resolve(config.from_file(file)).train.lr
        first, earlier = found.setdefault(cell.group, (cell.name, rate))
        if rate != earlier:
            what = f"train.lr is {earlier:g} in {first} and {rate:g} in {cell.name}"
            raise InputError(f"{folder} mixes learning rates ({what}): remove the runs of one of them")
    return {group: rate for group, (_, rate) in found.items()}


def choose(trials: Sequence[tuple[Cell, float]], folder: Path, used: Mapping[Group, float], auto: bool = False) -> dict[Group, Chosen]:
    """Return for every group the rate that it used before, or the one with the best score; the first of equal ones."""
    scores: dict[Group, dict[float, float | None]] = {}
    names: dict[Group, str] = {}
    metric = ACCURACY
    for cell, rate in trials:
        found, by = score(folder / cell.name)
        scores.setdefault(cell.group, {})[rate] = found
        metric = by or metric
        names.setdefault(cell.group, cell.name.rpartition("-")[0])
    best = {group: ladder.best(tried, metric.lower_is_better) for group, tried in scores.items()}
    return {group: Chosen(names[group], tried, used.get(group, best[group]), metric, auto) for group, tried in scores.items()}
