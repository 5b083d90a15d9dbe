"""`fedrts reproduce`."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedrts.cli.app import DataDir, Jobs, Quiet, app
from fedrts.cli.compare import end_with
from fedrts.cli.interrupt import as_interruption
from fedrts.cli.tables import print_table
from fedrts.errors import InputError


class ScaleOption(enum.StrEnum):
    paper = "paper"
    small = "small"


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A table or figure of the paper, or FILE.toml; leave it out to list them.")
    ] = None,
    scale: Annotated[ScaleOption, typer.Option(help="paper: the published setting; small: minutes on two cores.")] = ScaleOption.small,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; the same command continues there. Default: runs/NAME-SCALE.")
    ] = None,
    jobs: Jobs = None,
    show: Annotated[bool, typer.Option("--show", help="Print the preset, to copy and edit, and exit.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before a long computation.")] = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
) -> None:
    """Reproduce a table or figure of the paper.

    Writes results.md, results.csv and, for a figure, figure.png; its runs are ordinary run folders. Exit codes are those of `fedrts
    compare`.
    """
    from fedrts import reproduction
    from fedrts.reproduction import preset

    if name is None:
        print_table([_listed(entry) for entry in preset.names()], False)
        return
    if show:
        print(preset.text(name), end="")
        return
    chosen = preset.load(name)
    folder = out or Path("runs", f"{Path(name).stem}-{scale.value}")
    if scale is ScaleOption.paper and not yes:
        runs, seconds = reproduction.estimated(chosen, "paper", data_dir)
        duration = reproduction.estimate.in_words(seconds)
        _confirm(f"{runs} runs take {duration} on this machine (by timing plain training steps; less where clients run side by side)")
    with as_interruption(f"interrupted; the same command goes on in {folder}"):
        if quiet:
            document = reproduction.reproduce(name, folder, scale.value, jobs=jobs, data_dir=data_dir)
        else:
            from fedrts.comparison.watch import LiveWatcher

            with LiveWatcher() as watcher:
                document = reproduction.reproduce(name, folder, scale.value, jobs=jobs, data_dir=data_dir, watcher=watcher)
    if not quiet:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(document.markdown()))
        drawn = ", figure.png" if (folder / "figure.png").exists() else ""
        print(f"written to {folder}: results.md, results.csv{drawn}")
    end_with(*(outcome.compared for outcome in document.outcomes if outcome.compared is not None))


def _listed(name: str) -> dict[str, str]:
    from fedrts.reproduction import preset, size_of

    found = preset.load(name)
    sizes = {scale: size_of(getattr(found, scale)) for scale in ("small", "paper")}
    work = {scale: f"{size.runs} runs × {size.rounds} rounds" for scale, size in sizes.items()}
    samples = sizes["paper"].samples
    work["paper"] += "" if samples is None else f", {samples:.2g} samples"
    return {"name": name, "what it shows": found.title, **work}


def _confirm(words: str) -> None:
    """Ask whether to continue; without a terminal the answer is no."""
    if not sys.stdin.isatty():
        raise InputError(f"{words}: say --yes to start them")
    if not typer.confirm(f"{words}. Start them?", err=True):
        print("nothing was started", file=sys.stderr)
        sys.exit(0)
