"""A single run that first chooses its learning rate: a comparison of one cell that plays only its trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedrts import api, config
from fedrts.comparison import Comparison, Watcher, make_pool, tune_all, watched
from fedrts.comparison.grid import TUNE_SEED, Grid, Tuning
from fedrts.comparison.tuning import Chosen
from fedrts.config import Experiment
from fedrts.errors import InputError
from fedrts.runs.folder import TUNING_FILE, RunFolder


def with_best_rate(
    layers: Sequence[config.Tree],
    rates: Sequence[float] | str,
    out: Path,
    *,
    data_dir: Path | None = None,
    watcher: Watcher | None = None,
) -> tuple[Experiment, Chosen]:
    """Return the experiment with the best of the `rates` (or "auto") and the results of all; trials are kept in `out` and resumed there."""
    RunFolder(out).refuse_another()
    experiment = config.resolve(*layers)
    seed = TUNE_SEED if experiment.seed != TUNE_SEED else TUNE_SEED + 1
    densities = [] if config.method_class(experiment.method).dense else [experiment.density]
    grid = Grid(config.combined(*layers), [experiment.method], densities, [experiment.seed], tuning=Tuning(rates, seed))
    cells = grid.cells()
    api.prepared(cells[0].experiment, data_dir)  # what no rate can mend shows before anything is written
    pool, threads = make_pool(cells, 1)
    comparison = Comparison(grid, out, data_dir, threads, file=TUNING_FILE)
    with comparison.opened(), watched(watcher) as watching:
        failed = tune_all([comparison], pool, watching)
    (chosen,) = comparison.chosen.values()
    tuned = comparison.rated(comparison.cells[0])
    if tuned is None:
        why = next(iter(failed.values())).text if failed else "none has a finite score"
        tried = ", ".join(f"{rate:g}" for rate in chosen.scores)
        raise InputError(f"no learning rate of {tried} could be trained with ({why}): name others with --tune-lr, and another --out")
    return tuned.experiment.model_copy(update={"out": str(out)}), chosen
