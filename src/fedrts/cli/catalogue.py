"""Catalogues: `fedrts methods`, `models` and `data`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedrts.cli.app import AsJson, DataDir, app
from fedrts.cli.flags import Given, takes
from fedrts.cli.tables import print_table


@app.command()
def methods(
    as_json: AsJson = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print what each method keeps, does and sends, as a Markdown table.")
    ] = False,
) -> None:
    """List the methods with their options."""
    from fedrts import methods as kinds
    from fedrts.methods import describe

    if markdown:
        print(describe.table())
        return

    rows = []
    for name in kinds.names():
        kind = kinds.get(name)
        options = {option: info.default for option, info in kind.model_fields.items() if option != "density"}
        rows.append({"name": name, "what it does": _first_line(kind), "options": options})
    print_table(rows, as_json)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the models with their options."""
    from fedrts import models as builders

    own = ("input_shape", "classes")
    print_table([_described(name, builders.get(name), own) for name in builders.names()], as_json)


data_app = typer.Typer(invoke_without_command=True)
app.add_typer(data_app, name="data")


@data_app.callback()
def data(context: typer.Context, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the data sets, whether their files are there, and their options."""
    from fedrts import data as loaders

    context.obj = data_dir
    if context.invoked_subcommand is not None:
        return
    home = loaders.home(data_dir)
    rows = []
    for name in loaders.names():
        source = loaders.source(name)
        files = "-" if source is None else "missing" if source.missing(home) else "there"
        described = _described(name, loaders.get(name), ("folder",))
        rows.append({"name": name, "what it is": described["what it is"], "files": files, "options": described["options"]})
    print_table(rows, as_json)


@data_app.command()
def prepare(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A name from `fedrts data`.")],
    given: Annotated[Path | None, typer.Option("--from", metavar="PATH", help="Archive, file or folder that you already have.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Download a data set's files from their official address, check them, and read them once."""
    from fedrts import data as loaders
    from fedrts.data.prepare import prepare as bring
    from fedrts.observe.console import downloading

    home = loaders.home(data_dir or context.obj)
    with downloading() as report:
        held = bring(name, home, given, report)
    source = loaders.source(name)
    sizes_only = [file.name for file in source.files if file.checksum is None] if source and given is None else []
    if sizes_only:
        print(f"no checksum is published for {' and '.join(sizes_only)}: downloads of them are checked by their size alone")
    print(f"{name} is ready in {home}: {held.samples:,} training and {len(held.test_y):,} test samples, {held.classes:,} classes")


@data_app.command()
@takes("clients", "alpha", "partition", "seed")
def show(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="A name from `fedrts data`, folder:PATH, npz:PATH, csv:FILE, parquet:FILE, or an import path.")
    ],
    *,
    given: Given,
    out: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Write the picture to this file.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Show which client would hold which data, as a table and a picture."""
    from fedrts import config
    from fedrts.observe.picture import check_drawable, draw_clients
    from fedrts.runs.build import federation
    from fedrts.runs.summary import describe_clients

    if out is not None:
        check_drawable(out)
    experiment = config.resolve({"data": name}, *given.layers())
    held = describe_clients(*federation(experiment, data_dir or context.obj))
    print_table([_holding(client) for client in held], False)
    if out is not None:
        draw_clients(held, f"{name}: {experiment.clients.partition} over {len(held)} clients, seed {experiment.seed}", out)
        print(out)


def _holding(client: dict[str, Any]) -> dict[str, Any]:
    """Make a table row of a client in clients.json."""
    labels = client["labels"]
    if labels is None:
        return {"client": client["client"], "samples": client["samples"]}
    most = sorted(range(len(labels)), key=lambda label: -labels[label])[:5]
    often = ", ".join(f"{label}: {labels[label]:,}" for label in most if labels[label])
    return {**client, "labels": sum(count > 0 for count in labels), "most frequent": often}


def _described(name: str, function: Callable[..., Any], own: tuple[str, ...]) -> dict[str, Any]:
    import inspect as reflection

    parameters = reflection.signature(function).parameters.values()
    return {"name": name, "what it is": _first_line(function), "options": {p.name: p.default for p in parameters if p.name not in own}}


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").strip().partition("\n")[0]
