"""`fedrts regret`: the bandit of the paper's theory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedrts.cli.app import Quiet, app
from fedrts.cli.tables import print_table

if TYPE_CHECKING:
    from fedrts.bandit.study import Settings, Study


@app.command()
def regret(
    out: Annotated[Path, typer.Option(help="Folder for regret.csv, regret.md, regret.json and regret.png.")],
    arms: Annotated[int, typer.Option(help="Number of arms N (links).")] = 1000,
    pick: Annotated[int, typer.Option(help="Number of arms K played per step.")] = 100,
    steps: Annotated[int, typer.Option(help="Number of steps T.")] = 10_000,
    scale: Annotated[
        list[float] | None, typer.Option(help="λ of TSAdj; repeatable. Default 1 (the theory) and 10 (the experiments).")
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Number of independent repetitions, run side by side.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed for all randomness.")] = 0,
    gap: Annotated[float, typer.Option(help="Gap between the means of the K best arms and the others.")] = 0.4,
    means: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with your own means, one per line; sets the number of arms.")
    ] = None,
    reward: Annotated[
        str, typer.Option(help="total (top K), any_success, or your own as pkg.module:name: (actions, means) [..., N] → rewards [...].")
    ] = "total",
    clients: Annotated[int, typer.Option(help="Bernoulli draws averaged per outcome; 1 in the theory.")] = 1,
    lipschitz: Annotated[float, typer.Option(help="Lipschitz constant L of the reward, for the bound.")] = 1.0,
    universal: Annotated[float, typer.Option(help="Universal constant U of the bound; the paper does not give its value.")] = 1.0,
    epsilon: Annotated[float | None, typer.Option(help="ε of the bound; default: the value that makes the bound smallest.")] = None,
    quiet: Quiet = False,
) -> None:
    """Measure the regret of Thompson sampling (TSAdj), CUCB, greedy and random play, and compare it with the theorem's bound."""
    from fedrts.bandit import document as files
    from fedrts.bandit.study import Settings

    own = files.read_means(means) if means else None
    settings = Settings(
        arms if own is None else len(own),
        pick,
        steps,
        tuple(scale or (1.0, 10.0)),
        repetitions,
        seed,
        gap,
        own,
        reward,
        clients,
        lipschitz,
        universal,
        epsilon,
    )
    files.check_out(out)
    found = _watched(settings, quiet)
    written = files.write(found, out)
    if quiet:
        return
    print_table(files.rows(found, brief=True), False)
    print("\n".join(files.words(found)))
    print(f"{found.seconds:.1f} s; wrote {', '.join(map(str, written))}")


def _watched(settings: Settings, quiet: bool) -> Study:
    """Play the study with a progress bar per policy; Ctrl-C ends it."""
    from rich.console import Console
    from rich.progress import Progress

    from fedrts.bandit.study import names, study

    console = Console(stderr=True)
    try:
        with Progress(console=console, disable=quiet or not console.is_terminal) as progress:
            bars = {name: progress.add_task(name, total=settings.steps) for name in names(settings)}
            return study(settings, lambda name, step: progress.update(bars[name], completed=step))
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
