"""`fedrts run` and `fedrts resume`."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedrts.cli.app import Allow, DataDir, ExperimentFile, Quiet, RunDir, app
from fedrts.cli.flags import Given, takes
from fedrts.cli.interrupt import as_interruption
from fedrts.cli.lists import rates
from fedrts.cli.metrics import MetricsAt, metering

if TYPE_CHECKING:
    from fedrts.api import Result
    from fedrts.config import Experiment, Tree
    from fedrts.drain import Drain
    from fedrts.observe import Observer


@app.command()
@takes(
    *("method", "data", "model", "density", "rounds", "clients", "per_round", "epochs", "batch_size", "lr", "recipe", "seed"),
    *("engine", "device", "precision", "value_type", "init", "out"),
)
def run(
    experiment: ExperimentFile = None,
    *,
    given: Given,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Send at most this many bytes in total, such as 200MB; plans the density, value type and rounds that you do not set.",
        ),
    ] = None,
    tune_lr: Annotated[
        str | None,
        typer.Option(
            metavar="auto|X,Y,…",
            help="Choose the learning rate on a validation split first: from these, or auto (a grid that widens as needed).",
        ),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure which engine and how many slots are fastest on this machine, and remember it.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Profile some rounds; write a trace and tables to RUN_DIR/profile.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events to the run folder.")] = False,
    log: Annotated[
        str | None, typer.Option("--log", metavar="NAME,…", help="Also log to mlflow, wandb, tensorboard or csv (the key `callbacks`).")
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN_DIR", help="Start from a finished run: its settings, model, mask and posteriors."),
    ] = None,
    keep_mask: Annotated[bool, typer.Option("--keep-mask", help="With --from: keep the mask fixed.")] = False,
    metrics: MetricsAt = None,
    data_dir: DataDir = None,
    allow: Allow = None,
    quiet: Quiet = False,
) -> None:
    """Run an experiment. Without arguments: FedRTS at density 0.2 on handwritten digits, offline, in under a minute."""
    from fedrts import api, config, planning
    from fedrts.observe import Several
    from fedrts.observe.told import Told
    from fedrts.runs.folder import resume_command

    layers = [*given.layers(experiment), {} if log is None else {"callbacks": log}]
    with going_on(layers, from_run, keep_mask, allow) as layers:
        layers = layers if budget is None else planning.within(layers, budget, data_dir)
        resolved = config.resolve(*layers)
        if tune_lr is not None:
            resolved = with_best_rate(layers, tune_lr, Path(str(api.with_folder(resolved).out)), data_dir, quiet)
        resolved = api.with_folder(measured(resolved, data_dir, quiet) if tune else resolved)
        folder = Path(str(resolved.out))

        with metering(metrics, "run") as boards:

            def play(observer: Observer) -> Result:
                told = Several(watched(observer, folder, profile), *map(Told, boards)) if boards else watched(observer, folder, profile)
                return api.start(resolved, told, data_dir, tuned=tune_lr is not None)

            interruptible(play, quiet, resume_command(folder, resolved.model_dump()), tensorboard)


@contextlib.contextmanager
def going_on(layers: list[Tree], from_run: Path | None, keep_mask: bool, allow: list[str] | None) -> Iterator[list[Tree]]:
    """Merge the settings of a run that starts from another into one layer; inside the block only given or allowed code may be loaded."""
    from fedrts import config
    from fedrts.errors import InputError
    from fedrts.runs.folder import RunFolder
    from fedrts.runs.origin import settings_from

    if from_run is None:
        if keep_mask or allow:
            raise InputError(f"{'--keep-mask' if keep_mask else '--allow'} goes with --from RUN_DIR, a finished run to go on from")
        yield layers
        return
    asked, folder = config.combined(*layers), RunFolder(from_run)
    with folder.trusted(allow or (), asked):
        yield [settings_from(folder, asked, keep_mask)]


def with_best_rate(layers: list[Tree], text: str, out: Path, data_dir: Path | None, quiet: bool) -> Experiment:
    """Return the experiment with the best of the learning rates in `text`; show the trials and keep them in its run folder."""
    from fedrts.comparison.tuned_run import with_best_rate
    from fedrts.comparison.watch import LiveWatcher

    with as_interruption(f"interrupted while learning rates are tried; the same command with --out {shlex.quote(str(out))} goes on"):
        if quiet:
            return with_best_rate(layers, rates(text), out, data_dir=data_dir)[0]
        with LiveWatcher() as watcher:
            experiment, chosen = with_best_rate(layers, rates(text), out, data_dir=data_dir, watcher=watcher)
    tried = ", ".join(f"{rate:g}" for rate in sorted(chosen.scores))
    print(f"learning rate {experiment.train.lr:g}, by {chosen.metric.name} on the validation split; tried: {tried}")
    return experiment


def measured(experiment: Experiment, data_dir: Path | None, quiet: bool) -> Experiment:
    """Return the experiment with the fastest engine, and show what was measured."""
    from rich.console import Console
    from rich.table import Table

    from fedrts.engines.kinds import kind
    from fedrts.runs import engine_tuning

    tuned = engine_tuning.tune(experiment, data_dir)
    table = Table(title="tuned: remembered from an earlier run" if tuned.remembered else "tuned", title_justify="left")
    for heading in ("engine", "kernel", "slots", "threads", "samples/s"):
        table.add_column(heading, justify="left" if heading in ("engine", "kernel") else "right")
    for found, speed in tuned.samples_per_second.items():
        side_by_side = (found.kernel, str(found.slots), str(found.workers)) if kind(found.name).side_by_side else ("", "", "")
        table.add_row(found.name, *side_by_side, f"{speed:,.0f}" if speed else "the only choice")
    if not quiet:
        Console().print(table)
    return tuned.experiment


def watched(observer: Observer, folder: Path, profile: bool) -> Observer:
    """Add a profiling observer if the run is to be profiled."""
    from fedrts.observe import Several
    from fedrts.observe.profile import ProfileObserver

    return Several(observer, ProfileObserver(folder / "profile")) if profile else observer


@app.command()
def resume(
    run_dir: RunDir,
    rounds: Annotated[int | None, typer.Option(help="Train up to this many rounds in total; also extends a finished run.")] = None,
    metrics: MetricsAt = None,
    data_dir: DataDir = None,
    allow: Allow = None,
    quiet: Quiet = False,
) -> None:
    """Continue an interrupted run to exactly the result it would have had, or extend a run with --rounds."""
    from fedrts import api, config
    from fedrts.observe import Several
    from fedrts.observe.told import Told
    from fedrts.runs.folder import RunFolder, resume_command

    if rounds is None and RunFolder(run_dir).summary() is not None:
        RunFolder(run_dir).verify()
        stopped = (RunFolder(run_dir).summary() or {}).get("stopped")
        early = f" early, after round {stopped['round']}; `--rounds {stopped['planned']}` goes on" if stopped else ""
        print(f"{run_dir} is finished{early}; `fedrts inspect {run_dir}` shows it")
        return
    settings = config.from_file(RunFolder(run_dir).experiment_file())
    tensorboard = (run_dir / "tensorboard").is_dir() and "tensorboard" not in settings.get("callbacks", [])
    again = resume_command(run_dir, settings)

    with metering(metrics, "run") as boards:

        def go_on(observer: Observer) -> Result:
            told = Several(observer, *map(Told, boards)) if boards else observer
            return api.resume(run_dir, rounds=rounds, data_dir=data_dir, observer=told, trust=allow or ())

        interruptible(go_on, quiet, again, tensorboard)


def interruptible(
    play: Callable[[Observer], Result], quiet: bool, again: str, tensorboard: bool = False, drain: Drain | None = None
) -> None:
    """Play a run with progress output; after Ctrl-C or SIGTERM print `again`, the command that continues.

    With a `drain`, SIGTERM lets the running round end.
    """
    from fedrts.observe import Several, Silent
    from fedrts.observe.console import ConsoleObserver
    from fedrts.observe.tensorboard import TensorBoardObserver

    with as_interruption(f"interrupted; continue with: {again}", drain):
        play(Several(Silent() if quiet else ConsoleObserver(), *([TensorBoardObserver()] if tensorboard else [])))
