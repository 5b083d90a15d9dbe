"""Comparing methods: a grid of runs, each cell resumable, and a table with statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedrts import config
from fedrts.comparison import pool as pools
from fedrts.comparison import record, tuning
from fedrts.comparison.cluster import Cluster
from fedrts.comparison.grid import Cell, Grid, Group, Tuning, check_method
from fedrts.comparison.keys import summary_key
from fedrts.comparison.notebook import NotebookWatcher
from fedrts.comparison.play import CellTask, News
from fedrts.comparison.pool import Pool
from fedrts.comparison.results import Compared
from fedrts.engines.kinds import kind
from fedrts.errors import InputError, note
from fedrts.observe.notebook import in_notebook
from fedrts.planning import units
from fedrts.runs.folder import TUNING, RunFolder
from fedrts.tasks import metrics
from fedrts.tasks.metrics import Metric, of_run


class Watcher(Protocol):
    """Receives the progress of a comparison."""

    def expect(self, tasks: Sequence[CellTask], what: str) -> None:
        """Announce the next tasks; some may be finished already."""
        ...

    def tell(self, news: News) -> None: ...


class Unwatched:
    """A watcher that shows nothing."""

    def expect(self, tasks: Sequence[CellTask], what: str) -> None: ...

    def tell(self, news: News) -> None: ...


@contextlib.contextmanager
def watched(watcher: Watcher | None) -> Iterator[Watcher]:
    """Return the `watcher` or, if none is given, a progress bar in a notebook and nothing elsewhere."""
    if watcher is not None or not in_notebook():
        yield watcher or Unwatched()
        return
    bar = NotebookWatcher()
    try:
        yield bar
    finally:
        bar.stopped()


@dataclass
class Comparison:
    """A grid and the folder in which it runs."""

    grid: Grid
    out: Path
    data_dir: Path | None
    threads: int
    label: str = ""
    """Goes before the names of its cells."""
    file: str = record.FILE
    """Where it is written down what the folder holds."""
    cells: list[Cell] = field(init=False)
    chosen: dict[Group, tuning.Chosen] = field(default_factory=dict, init=False)
    _added: dict[Group, list[float]] = field(default_factory=dict, init=False)
    """Learning rates that are tried beside the first."""

    def __post_init__(self) -> None:
        self.cells = self.grid.cells()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the folder and record the comparison; refuse a folder with another comparison."""
        self.grid.trials()  # a mistake in them is told before anything is written
        with record.held(self.out, self.file):
            self.threads = record.record(self.out, self.grid, self.cells, self.threads, self.data_dir, self.file)
            yield

    def trial_tasks(self) -> list[CellTask]:
        return [self._task(cell, TUNING) for cell, _ in self.grid.trials()]

    def wider_tasks(self) -> list[CellTask]:
        """Return trials beyond the rates tried so far, for groups whose best rate is at an end."""
        wider = {group: entry.wider for group, entry in self._judged().items() if entry.wider is not None}
        for group, rate in wider.items():
            self._added.setdefault(group, []).append(rate)
        return [self._task(cell, TUNING) for cell, rate in self.grid.trials(self._added) if wider.get(cell.group) == rate]

    def choose_rates(self) -> None:
        """Choose among the finished trials and record their results."""
        self.chosen = self._judged()
        record.note_tried(self.out / self.file, self.chosen.values())

    def _judged(self) -> dict[Group, tuning.Chosen]:
        auto = self.grid.tuning is not None and self.grid.tuning.auto
        return tuning.choose(self.grid.trials(self._added), self.out / TUNING, tuning.used(self.cells, self.out / "runs"), auto)

    def tasks(self) -> list[CellTask]:
        """Return the cells that can run: all except those of groups without a learning rate."""
        rated = [self.rated(cell) for cell in self.cells]
        return [self._task(cell, "runs") for cell in rated if cell is not None]

    def rated(self, cell: Cell) -> Cell | None:
        """Return a cell with its chosen learning rate; None if there is none."""
        if self.grid.tuning is None:
            return cell
        rate = self.chosen[cell.group].rate
        if rate is None:
            return None
        train = cell.experiment.train.model_copy(update={"lr": rate})
        return Cell(cell.name, cell.place, cell.experiment.model_copy(update={"train": train}))

    def _task(self, cell: Cell, kind: str) -> CellTask:
        return CellTask(self.label + cell.name, self.out / kind / cell.name, cell.experiment, self.data_dir, self.threads)

    def compared(self, failed: Mapping[str, News]) -> Compared:
        """Return the results of finished cells; `failed` says why others have none."""
        rows: list[dict[str, Any]] = []
        failures: dict[str, News] = {}
        declared: dict[str, Metric] = {}
        for cell in self.cells:
            folder = RunFolder(self.out / "runs" / cell.name)
            summary = folder.summary()
            if summary is not None:
                folder.verify()
                declared = {metric.name: metric for metric in of_run(summary)} | declared
                summary = {key: value for key, value in summary.items() if key not in ("digests", "metrics")}
                rate = {} if self.grid.tuning is None else {"train.lr": self.chosen[cell.group].rate}
                rows.append({"cell": cell.name, **cell.place, **rate, **summary})
            else:
                unknown = News(cell.name, "failed", text="no learning rate among those tried could be trained with")
                failures[cell.name] = failed.get(self.label + cell.name, unknown)
        return Compared(self.out, self.grid, self.cells, rows, failures, list(self.chosen.values()), list(declared.values()))


def play_all(comparisons: Sequence[Comparison], pool: Pool, watcher: Watcher) -> dict[str, News]:
    """Run the unfinished cells of all comparisons, trials of learning rates first; return failures by name."""
    tune_all(comparisons, pool, watcher)  # a rate that cannot be trained with is an answer, not a failure
    return _play([task for comparison in comparisons for task in comparison.tasks()], "cells", pool, watcher)


def tune_all(comparisons: Sequence[Comparison], pool: Pool, watcher: Watcher) -> dict[str, News]:
    """Try learning rates for comparisons that choose them, until none is left to try; return failures by name."""
    comparisons = [comparison for comparison in comparisons if comparison.grid.tuning is not None]
    failed: dict[str, News] = {}
    tasks = [task for comparison in comparisons for task in comparison.trial_tasks()]
    what = "tuning"
    while tasks:
        failed |= _play(tasks, what, pool, watcher)
        tasks = [task for comparison in comparisons for task in comparison.wider_tasks()]
        what = "tuning, wider"
    for comparison in comparisons:
        comparison.choose_rates()
        for entry in comparison.chosen.values():
            if entry.remark is not None:
                note(comparison.label + entry.remark)
    return failed


def _play(tasks: Sequence[CellTask], what: str, pool: Pool, watcher: Watcher) -> dict[str, News]:
    """Run the unfinished ones of these tasks; return failures by name."""
    failed: dict[str, News] = {}

    def tell(news: News) -> None:
        if news.kind == "failed":
            failed[news.cell] = news
        watcher.tell(news)

    watcher.expect(tasks, what)
    pool.play([task for task in tasks if not task.is_finished], tell)
    return failed


def make_pool(cells: Sequence[Cell], jobs: int | None) -> tuple[Pool, int]:
    """Make the pool that runs the cells, and the threads of each."""
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs must be at least 1 (got {jobs})")
    first = cells[0].experiment
    jobs = jobs or pools.default_jobs(first.device, len(cells))
    settings = first.engine
    if kind(settings.name).has_cluster:
        gpus = settings.gpus or (1 / pools.JOBS_ON_GPU if first.device != "cpu" else 0)
        return Cluster(jobs, settings.but(gpus=gpus)), int(settings.cpus) or pools.default_threads(jobs)
    return pools.make(jobs), pools.default_threads(jobs)


def run_grid(
    grid: Grid,
    out: Path,
    *,
    metric: str | None = None,
    reference: str | None = None,
    jobs: int | None = None,
    data_dir: Path | None = None,
    watcher: Watcher | None = None,
) -> Compared:
    """Run the unfinished cells of a grid in its folder and write the results."""
    check_metric(metric, grid)
    if reference is not None:
        check_method(reference, grid.methods, "--reference")
    pool, threads = make_pool(grid.cells(), jobs)
    comparison = Comparison(grid, out, data_dir, threads)
    with comparison.opened():
        with watched(watcher) as watching:
            failed = play_all([comparison], pool, watching)
        compared = comparison.compared(failed)
        compared.write(metric, reference)
    return compared


def check_metric(name: str | None, grid: Grid) -> None:
    """Check that these runs can have this number. Metrics of your own task are known only when a run is over."""
    experiments = [cell.experiment for cell in grid.cells()]
    if name is None or any(config.foreign({"data": experiment.data}) for experiment in experiments):
        return
    summary_key(name, [metrics.get(metric) for experiment in experiments for metric in experiment.eval.metrics])


def seeds_of(base: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the seeds of a comparison that names none: its experiment's, or 0."""
    return (base.get("seed", 0),)


def compare(
    experiment: str | Path | None = None,
    *,
    methods: Sequence[str],
    out: str | Path,
    densities: Iterable[float] = (),
    seeds: Iterable[int] | None = None,
    grid: Mapping[str, Iterable[Any]] | None = None,
    metric: str | None = None,
    reference: str | None = None,
    budget: str | float | None = None,
    tune_lr: Iterable[float] | str | None = None,
    tune_seed: int | None = None,
    tune_rounds: int | None = None,
    jobs: int = 1,
    data_dir: str | Path | None = None,
    watcher: Watcher | None = None,
    **keywords: Any,
) -> Compared:
    """Compare methods × densities × seeds × `grid`, resuming what `out` holds; other keywords are those of `run`.

    `fedrts.compare(methods=["fedrts", "random"], densities=[0.1, 0.2], seeds=range(5), reference="random", data="digits", out="compared")`
    `grid={"topology.interval": [5, 10]}` varies any other key. `budget="200MB"` gives every run the same bytes: as many rounds as they
    pay for, at most `rounds`. `tune_lr` names learning rates to choose from, or "auto". A cell that fails is in `failures`, the
    others are in `rows`. With `jobs` above 1 cells run in processes of their own: the calling script then needs
    `if __name__ == "__main__":`.
    """
    if isinstance(methods, str) or not all(isinstance(name, str) for name in methods):
        raise InputError("methods must be a list of names; options of a method are method_options, or keys of the grid")
    if grid is not None and not isinstance(grid, Mapping):
        raise InputError(f"grid must name keys and their values, as in {{'train.lr': [0.1, 0.2]}} (got {grid!r})")
    axes = {f"grid[{key!r}]": values for key, values in (grid or {}).items()}
    lists = {"densities": densities, "seeds": seeds, "tune_lr": None if isinstance(tune_lr, str) else tune_lr, **axes}
    for name, given in lists.items():
        if given is not None and (isinstance(given, str) or not isinstance(given, Iterable)):
            raise InputError(f"{name} must be a list (got {given!r})")
    if not isinstance(jobs, int):
        raise InputError(f"jobs must be a whole number (got {jobs!r})")
    layers = ([config.from_file(experiment)] if experiment is not None else []) + [config.from_keywords(keywords)]
    base = config.combined(*layers)
    rates = tune_lr if isinstance(tune_lr, str) else None if tune_lr is None else config.plain(list(tune_lr))
    folder = Path(data_dir) if data_dir is not None else None
    made = Grid(
        base,
        tuple(methods),
        config.plain(list(densities)),
        seeds_of(base) if seeds is None else config.plain(list(seeds)),
        {key: tuple(config.plain(list(values))) for key, values in (grid or {}).items()},
        Tuning.of(rates, tune_seed, tune_rounds),
        budget=None if budget is None else units.size(budget),
        data_dir=folder,
    )
    return run_grid(made, Path(out), metric=metric, reference=reference, jobs=jobs, data_dir=folder, watcher=watcher)
