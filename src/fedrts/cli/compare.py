"""`fedrts compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedrts.cli.app import DataDir, ExperimentFile, Jobs, Quiet, app
from fedrts.cli.flags import Given, takes
from fedrts.cli.interrupt import as_interruption
from fedrts.cli.lists import numbers, rates
from fedrts.errors import InputError

if TYPE_CHECKING:
    from fedrts.comparison.results import Compared


@app.command()
@takes(
    *("data", "model", "rounds", "clients", "per_round", "epochs", "batch_size", "lr", "recipe"),
    *("engine", "device", "precision", "value_type", "init"),
)
def compare(
    experiment: ExperimentFile = None,
    methods: Annotated[str, typer.Option(metavar="A,B,…", help="Names from `fedrts methods`.")] = "",
    densities: Annotated[str, typer.Option(metavar="X,Y,…", help="Shares of parameters that stay active; default: the experiment's.")] = "",
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Seeds for every cell; statistical tests need five or more. Default: the experiment's."),
    ] = None,
    grid: Annotated[list[str] | None, typer.Option("--grid", metavar="TABLE.KEY=A,B", help="Any other key to vary; repeatable.")] = None,
    metric: Annotated[
        str | None, typer.Option(help="Metric for the table: a key of summary.json. Default: accuracy_last10, or the leading metric's.")
    ] = None,
    reference: Annotated[str | None, typer.Option(help="Method to test the others against, paired over seeds.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Give every run the same bytes, such as 200MB; each runs for as many rounds as fit, at most --rounds."
        ),
    ] = None,
    tune_lr: Annotated[
        str | None,
        typer.Option(
            metavar="auto|X,Y,…",
            help="Choose each method's learning rate on a validation split: from these, or auto (a grid that widens as needed).",
        ),
    ] = None,
    tune_seed: Annotated[
        int | None, typer.Option(help="Seed of the learning-rate trials; must not be one of --seeds. Default: 1000.")
    ] = None,
    tune_rounds: Annotated[int | None, typer.Option(help="Rounds per trial; default: as many as a full run.")] = None,
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the comparison; the same command continues an interrupted one.")] = None,
    *,
    given: Given,
    data_dir: DataDir = None,
    quiet: Quiet = False,
) -> None:
    """Compare methods × densities × seeds × any other keys in a table with statistics.

    The same command continues an interrupted comparison and never repeats finished cells. Exit code 1: some cells failed;
    the table shows the others.
    """
    if not methods:
        raise InputError("name what to compare: --methods fedrts,random (see `fedrts methods`)")
    if out is None:
        raise InputError("name a folder for the comparison: --out DIR")
    from fedrts import comparison, config
    from fedrts.comparison.grid import Grid, Tuning, parsed_axis
    from fedrts.planning import units

    base = config.combined(*given.layers(experiment))
    axes = [parsed_axis(text) for text in grid or []]
    for key in {key for key, _ in axes if [other for other, _ in axes].count(key) > 1}:
        raise InputError(f"--grid names {key} twice: give all its values at once")
    made = Grid(
        base,
        [name.strip() for name in methods.split(",") if name.strip()],
        numbers("--densities", densities, float),
        comparison.seeds_of(base) if seeds is None else numbers("--seeds", seeds, int),
        dict(axes),
        Tuning.of(None if tune_lr is None else rates(tune_lr), tune_seed, tune_rounds),
        budget=None if budget is None else units.size(budget),
        data_dir=data_dir,
    )
    options = {"metric": metric, "reference": reference, "jobs": jobs, "data_dir": data_dir}
    with as_interruption(f"interrupted; the same command goes on in {out}"):
        if quiet:
            compared = comparison.run_grid(made, out, **options)  # type: ignore[arg-type]
        else:
            from fedrts.comparison.watch import LiveWatcher

            with LiveWatcher() as watcher:
                compared = comparison.run_grid(made, out, **options, watcher=watcher)  # type: ignore[arg-type]
    if not quiet:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(compared.markdown(metric, reference)))
        print(f"written to {out}: results.md, results.csv")
    end_with(compared)


def end_with(*all_compared: Compared) -> None:
    """Exit with code 1 and one line per failed cell, if any cell failed."""
    failures = [(compared.out, name, news) for compared in all_compared for name, news in compared.failures.items()]
    for _, name, news in failures:
        print(f"failed: {name}: {news.text}", file=sys.stderr)
    if failures:
        cells = "1 cell" if len(failures) == 1 else f"{len(failures)} cells"
        print(f"{cells} failed, see {failures[0][0] / 'failures.json'}; the same command tries them again", file=sys.stderr)
        sys.exit(1)
