"""`fedrts plan`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from fedrts.cli.app import AsJson, DataDir, ExperimentFile, app
from fedrts.cli.cost import whole_numbers
from fedrts.cli.flags import Given, takes
from fedrts.errors import InputError

if TYPE_CHECKING:
    from fedrts.planning import BudgetPlan


@app.command()
@takes("model", "method", "density", "data", "rounds", "clients", "epochs", "batch_size", "value_type", "recipe", "seed")
def plan(
    experiment: ExperimentFile = None,
    *,
    given: Given,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes in total, over all clients and rounds, both ways; such as 200MB.")
    ] = None,
    per_round: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes per client and round, such as 2MB. (Clients per round: --set clients.per_round=N.)"),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="SPEED", help="Speed of the link between a client and the server, such as 5Mbit/s; adds times to the table."),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --link: time limit for a round's messages, such as 60s.")
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Shape of an input, in place of --data: 3,32,32 for images, 256 for tokens.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="With --input-shape: number of classes, or size of the vocabulary.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Plan density, value type and rounds for a budget of bytes; recommend one plan and print the command that runs it.

    Values that you set are kept; the rest is planned. `fedrts run --budget 200MB` plans and runs in one step.
    """
    if input_shape is not None and "data" in given.flags:
        raise InputError("--data and --input-shape exclude each other: both say what the model reads")
    shape = None if input_shape is None else whole_numbers("--input-shape", input_shape)
    from fedrts import config, planning
    from fedrts.planning.allowance import Allowance

    allowance = Allowance.of(budget, per_round, link, deadline)
    layers = given.layers(experiment)
    found = planning.of_settings(layers, allowance, None, shape, classes, data_dir)
    command = found.command(experiment, config.flat(config.combined(*layers[1:])))
    if as_json:
        print(json.dumps(found.as_dict() | {"command": command}, indent=2))
    else:
        _print_plan(found, command)


def _print_plan(found: BudgetPlan, command: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fedrts.planning.units import shown_size

    console, e = Console(highlight=False), found.experiment
    clients = f"{e.clients.per_round} of {e.clients.total} clients a round"
    console.print(f"{found.words} · {e.method} · {e.model} · {clients}, {e.rounds} rounds where they fit", markup=False)
    timed = found.chosen.seconds is not None
    paying = any(one.affordable > one.rounds for one in found.fitting)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("", "density", "values", "rounds", *["pays for"] * paying, "in all", "a round", "memory", "FLOPs", *["time"] * timed):
        table.add_column(heading, justify="left" if heading in ("", "values") else "right", no_wrap=True)
    for one in found.fitting:
        cells = [f"{one.density:g}", one.value_type, f"{one.rounds:,}", *[f"{one.affordable:,}"] * paying, shown_size(one.bytes)]
        cells += [shown_size(one.client_bytes), shown_size(one.memory_bytes), _short(one.flops)]
        cells += [f"{one.seconds:.2g} s"] if one.seconds is not None else []
        mark, style = ("→", "bold") if one is found.chosen else ("", None)
        table.add_row(mark, *cells, style=style)
    console.print(table)
    console.print(f"→ {found.why}.", markup=False)
    print(command)


def _short(value: float) -> str:
    """`1.7e9`."""
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits}e{int(power)}"
