"""The Typer application and the options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedrts.errors import InputError
from fedrts.logs import LogFormat, LogLevel, set_up

app = typer.Typer(
    help="Federated learning of sparse models: FedRTS and the methods it is compared with.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder.")]


def _import_paths(given: list[str] | None) -> list[str] | None:
    if wrong := [path for path in given or [] if ":" not in path]:
        raise InputError(f"--allow {wrong[0]}: an import path is PKG.MODULE:NAME")
    return given


Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="PKG.MODULE:NAME", callback=_import_paths, help="Your own code that the experiment may load; repeatable."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
FormatOfLogs = Annotated[
    LogFormat,
    typer.Option(
        "--log-format", callback=lambda value: set_up(format=value), is_eager=True, help="Log as text, or as one JSON object per line."
    ),
]
"""This and the next take effect before the command begins, so that its own errors follow them."""
LevelOfLogs = Annotated[
    LogLevel,
    typer.Option("--log-level", callback=lambda value: set_up(level=value), is_eager=True, help="Log only this level and above."),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the data sets' files; default: $FEDRTS_DATA, or ~/.cache/fedrts.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Jobs = Annotated[
    int | None,
    typer.Option(help="Number of runs in parallel, each in a process of its own; default: one per core, two on a GPU.", show_default=False),
]
ExperimentFile = Annotated[Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="An experiment file; flags override it.")]
