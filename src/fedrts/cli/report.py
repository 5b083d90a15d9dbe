"""`fedrts report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedrts.cli.app import Quiet, app


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Run folders, or folders that contain run folders.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default: DIR if you give one, else the current folder.")] = None,
    png: Annotated[bool, typer.Option("--png/--no-png", help="Also draw the figures as PNG files.")] = True,
    quiet: Quiet = False,
) -> None:
    """Write a self-contained report.html with figures and tables of runs, and the same as PNG, CSV and Markdown."""
    from rich.console import Console
    from rich.markup import escape

    from fedrts.report import write

    console = Console(stderr=True)
    with console.status("reading run folders") as status:
        file, made = write(folders, out, png, lambda what, done, total: status.update(f"{escape(what)}: {done + 1} of {total}"))
    for line in made.problems:
        print(f"note: {line}", file=sys.stderr)
    if not quiet:
        print(f"{made.text}: {len(made.figures)} figures, {len(made.tables)} tables")
        print(file)
