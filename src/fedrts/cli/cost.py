"""`fedrts cost`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from fedrts.cli.app import AsJson, DataDir, ExperimentFile, app
from fedrts.cli.flags import Given, takes
from fedrts.cli.tables import print_csv
from fedrts.errors import InputError

if TYPE_CHECKING:
    from fedrts.costs.table import Cost


@app.command()
@takes("model", "method", "density", "data", "clients", "epochs", "batch_size", "value_type", "recipe", "seed")
def cost(
    experiment: ExperimentFile = None,
    *,
    given: Given,
    input_shape: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Shape of an input, in place of --data: 3,32,32 for images, 256 for tokens.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="With --input-shape: number of classes, or size of the vocabulary.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples per client; default: its share of the data, or 500.")] = None,
    data_dir: DataDir = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Count the cost of a client that really trains, instead of one step on two samples.")
    ] = False,
    step: Annotated[bool, typer.Option("--step", help="Measure time and memory of a step on this machine, dense and sparse.")] = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of tables.")] = False,
) -> None:
    """Show bytes, FLOPs and memory per client and round in three accountings: the paper's tables, the paper's rules, and measured."""
    if as_json and as_csv:
        raise InputError("--json and --csv exclude each other: choose one")
    if input_shape is not None and "data" in given.flags:
        raise InputError("--data and --input-shape exclude each other: both say what the model reads")
    shape = None if input_shape is None else whole_numbers("--input-shape", input_shape)
    from fedrts import costs

    found = costs.of_settings(given.layers(experiment), None, shape, classes, samples, exact, data_dir, step)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    elif as_csv:
        print_csv([{"model": found.model, "method": found.method, "density": found.density, **row.as_flat_dict()} for row in found.rows])
    else:
        _print_cost(found)


def whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    """Parse `3,32,32` into numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{flag} takes whole numbers with commas between them, such as 3,32,32 (got '{text}')") from None


def _print_cost(found: Cost) -> None:
    """Print one table per accounting, so that they are not compared by accident."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fedrts.costs.table import ACCOUNTINGS

    console = Console(highlight=False)
    falling = "" if found.density_start is None else f" in the end, {found.density_start:g} in these first rounds"
    console.print(
        f"{found.method} · {found.model} with {found.parameters:,} parameters, {found.links:,} prunable · "
        f"density {found.density:g}{falling} · "
        f"{found.macs:,.0f} MAC a sample of shape {list(found.input_shape)} · {found.samples:,} samples, {found.epochs} epochs, "
        f"batches of {found.batch_size}",
        markup=False,
    )
    for accounting, meaning in ACCOUNTINGS.items():
        rows = [row for row in found.rows if row.accounting == accounting]
        cased, on_mask = any(row.case for row in rows), rows[0].memory_on_mask_bytes is not None
        unit, divisor = ("MB", 1e6) if max(row.upload_bytes for row in rows) >= 1e5 else ("kB", 1e3)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for column in ["round"] + ["case"] * cased:
            table.add_column(column, no_wrap=True)
        for column in [f"down {unit}", f"up {unit}", "both", "FLOPs", "memory MB"] + ["on mask"] * on_mask:
            table.add_column(column, justify="right", no_wrap=True)
        for row in rows:
            lengths = (row.download_bytes, row.upload_bytes, row.download_bytes + row.upload_bytes)
            memory = [row.memory_bytes] + [row.memory_on_mask_bytes or 0.0] * on_mask
            travelling, held = [f"{size / divisor:.3f}" for size in lengths], [f"{size / 1e6:.3f}" for size in memory]
            table.add_row(row.round, *[row.case] * cased, *travelling, f"{row.flops:.4g}".replace("e+", "e"), *held)
        console.print(f"\n[bold]{accounting}[/bold]: {meaning}")
        console.print(table)
    if found.steps:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("kernel", no_wrap=True)
        for column in ("step ms", "adds MB"):
            table.add_column(column, justify="right", no_wrap=True)
        for timed in found.steps:
            table.add_row(timed.kernel, f"{timed.milliseconds:.2f}", "" if timed.added_bytes is None else f"{timed.added_bytes / 1e6:.1f}")
        console.print("\n[bold]on this machine[/bold]: steps of an inner round on whole batches, from the download to the upload")
        console.print(table)
