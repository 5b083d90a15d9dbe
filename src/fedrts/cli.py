"""The command line. Everything heavy is imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import enum
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

import fedrts
from fedrts.errors import InputError, Note

if TYPE_CHECKING:
    from fedrts.accounting import Cost
    from fedrts.api import Result
    from fedrts.observe import Observer

app = typer.Typer(
    help="Federated learning of sparse models: FedRTS and what it is compared with.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # what typer raises for every mistake on the command line

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the data sets' files; default $FEDRTS_DATA, or ~/.cache/fedrts.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main() -> None:
    """The entry point: exit code 0 done, 2 bad input, 130 interrupted."""
    warnings.showwarning = _show_warning
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
    except _UsageError as error:
        if message := " ".join(error.format_message().split()):  # type: ignore[attr-defined]
            print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    text = f"note: {message}" if issubclass(category, Note) else warnings.formatwarning(message, category, filename, lineno).rstrip()
    print(text, file=sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        print(fedrts.__version__)
        raise typer.Exit


@app.callback()
def fedrts_command(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Federated learning of sparse models: FedRTS and what it is compared with."""


@app.command()
def run(
    experiment: Annotated[Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="An experiment file; flags override it.")] = None,
    method: Annotated[str | None, typer.Option(help="A name from `fedrts methods`.")] = None,
    data: Annotated[
        str | None, typer.Option(help="A name from `fedrts data`, folder:PATH, npz:PATH, or an import path pkg.module:name.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A name from `fedrts models`, an import path, or auto.")] = None,
    density: Annotated[float | None, typer.Option(help="Share of all parameters that stay active.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in the federation.")] = None,
    per_round: Annotated[int | None, typer.Option(help="Clients that take part in a round.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the local data in a round.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto or serial.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    value_type: Annotated[str | None, typer.Option(help="How values travel: float32 (lossless), float16 or int8.")] = None,
    init: Annotated[Path | None, typer.Option(metavar="FILE", help="Start from the weights of this safetensors file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/<time>-<data>-<method>-<seed>.")] = None,
    data_dir: DataDir = None,
    assignments: Annotated[list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any other key; repeatable.")] = None,
    quiet: Quiet = False,
) -> None:
    """Run an experiment. Without arguments: FedRTS at density 0.2 on handwritten digits, offline, in under a minute."""
    from fedrts import api, config

    names = (
        "method",
        "data",
        "model",
        "density",
        "rounds",
        "clients",
        "per_round",
        "epochs",
        "batch_size",
        "lr",
        "seed",
        "engine",
        "value_type",
        "device",
        "init",
    )
    flags = {name: value for name, value in locals().items() if name in names}
    layers = [config.from_file(experiment)] if experiment else []
    layers += [config.from_keywords({**flags, "out": str(out) if out else None}), config.from_assignments(assignments or [])]
    resolved = api.with_folder(config.resolve(*layers))
    _interruptible(lambda observer: api.start(resolved, observer, data_dir), Path(str(resolved.out)), quiet)


@app.command()
def resume(run_dir: RunDir, data_dir: DataDir = None, quiet: Quiet = False) -> None:
    """Continue an interrupted run to exactly the result it would have had."""
    from fedrts import api
    from fedrts.folder import RunFolder

    if RunFolder(run_dir).summary() is not None:
        print(f"{run_dir} is finished; `fedrts inspect {run_dir}` shows it")
        return
    _interruptible(lambda observer: api.resume(run_dir, data_dir=data_dir, observer=observer), run_dir, quiet)


@app.command()
def cost(
    experiment: Annotated[Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="An experiment file; flags override it.")] = None,
    model: Annotated[str | None, typer.Option(help="A name from `fedrts models`, an import path, or auto.")] = None,
    method: Annotated[str | None, typer.Option(help="A name from `fedrts methods`.")] = None,
    density: Annotated[float | None, typer.Option(help="Share of all parameters that stay active.")] = None,
    data: Annotated[str | None, typer.Option(help="What the model reads: a name from `fedrts data`, or an import path.")] = None,
    input_shape: Annotated[str | None, typer.Option(metavar="N,N,…", help="Instead of data: 3,32,32 for images, 256 for tokens.")] = None,
    classes: Annotated[int | None, typer.Option(help="With an input shape: classes, or words of the vocabulary.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of the client; default its share of the data, or 500.")] = None,
    clients: Annotated[int | None, typer.Option(help="Clients among which the data is divided.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the local data in a round.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step.")] = None,
    value_type: Annotated[str | None, typer.Option(help="How values travel: float32 (lossless), float16 or int8.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.")] = None,
    data_dir: DataDir = None,
    exact: Annotated[bool, typer.Option("--exact", help="Measure a client that really trains, not one step on two samples.")] = False,
    assignments: Annotated[list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any other key; repeatable.")] = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of tables.")] = False,
) -> None:
    """Bytes, FLOPs and memory per client and round, in three accountings: the paper's tables, the paper's rules, and measured."""
    if as_json and as_csv:
        raise InputError("--json and --csv exclude each other: choose one")
    if input_shape is not None and data is not None:
        raise InputError("--data and --input-shape exclude each other: both say what the model reads")
    shape = None if input_shape is None else _whole_numbers("--input-shape", input_shape)
    from fedrts import accounting, config

    names = ("model", "method", "density", "data", "clients", "epochs", "batch_size", "value_type", "seed")
    flags = {name: value for name, value in locals().items() if name in names}
    layers = [config.from_file(experiment)] if experiment else []
    layers += [config.from_keywords(flags), config.from_assignments(assignments or [])]
    found = accounting.of_settings(layers, None, shape, classes, samples, exact, data_dir)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    elif as_csv:
        _print_csv([{"model": found.model, "method": found.method, "density": found.density, **row.as_flat_dict()} for row in found.rows])
    else:
        _print_cost(found)


@app.command()
def methods(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="What each keeps, does and sends, as a Markdown table.")] = False,
) -> None:
    """List the methods with their options."""
    from fedrts import catalogue
    from fedrts import methods as kinds

    if markdown:
        print(catalogue.table())
        return

    rows = []
    for name in kinds.names():
        kind = kinds.get(name)
        options = {option: info.default for option, info in kind.model_fields.items() if option != "density"}
        rows.append({"name": name, "what it does": _first_line(kind), "options": options})
    _print_table(rows, as_json)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the models with their options."""
    from fedrts import models as builders

    own = ("input_shape", "classes")
    _print_table([_described(name, builders.get(name), own) for name in builders.names()], as_json)


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
    _print_table(rows, as_json)


@data_app.command()
def prepare(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A name from `fedrts data`.")],
    given: Annotated[
        Path | None, typer.Option("--from", metavar="PATH", help="An archive, a file or a folder that is here already.")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Download the files of a data set from their official address, check them, and read them once."""
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
    print(f"{name} is ready in {home}: {len(held.y):,} training and {len(held.test_y):,} test samples, {held.classes:,} classes")


@data_app.command()
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A name from `fedrts data`, folder:PATH, npz:PATH, or an import path.")],
    clients: Annotated[int | None, typer.Option(help="Clients in the federation.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Dirichlet concentration: lower is more heterogeneous.")] = None,
    partition: Annotated[str | None, typer.Option(help="dirichlet, quantity, iid or shards.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the partition.")] = None,
    assignments: Annotated[list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any other key; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it into this file.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Show which client would hold what, as a table and a picture."""
    from fedrts import config
    from fedrts.assemble import federation
    from fedrts.observe.picture import check_drawable, draw_clients
    from fedrts.summary import describe_clients

    if out is not None:
        check_drawable(out)
    table = {"total": clients, "alpha": alpha, "partition": partition}
    given = config.from_keywords({"data": name, "seed": seed, "clients": {key: entry for key, entry in table.items() if entry is not None}})
    experiment = config.resolve(given, config.from_assignments(assignments or []))
    held = describe_clients(*federation(experiment, data_dir or context.obj))
    _print_table([_holding(client) for client in held], False)
    if out is not None:
        draw_clients(held, f"{name}: {experiment.clients.partition} over {len(held)} clients, seed {experiment.seed}", out)
        print(out)


def _holding(client: dict[str, Any]) -> dict[str, Any]:
    """A client of clients.json as a row of a table."""
    labels = client["labels"]
    if labels is None:
        return {"client": client["client"], "samples": client["samples"]}
    most = sorted(range(len(labels)), key=lambda label: -labels[label])[:5]
    often = ", ".join(f"{label}: {labels[label]:,}" for label in most if labels[label])
    return {**client, "labels": sum(count > 0 for count in labels), "most frequent": often}


@app.command()
def inspect(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Show what a run folder holds: progress, results, and the density of every layer."""
    from fedrts.inspection import inspect_run

    content = inspect_run(run_dir)
    if as_json:
        print(json.dumps(content, indent=2))
        return
    facts = {key: value for key, value in content.items() if key != "layers"}
    _print_table([{"run": key, str(run_dir): value} for key, value in facts.items()], False)
    if content["layers"]:
        _print_table(content["layers"], False)


@app.command()
def evaluate(
    run_dir: RunDir,
    data: Annotated[str | None, typer.Option(help="Test on another data set than the run's.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Test the model of a run folder."""
    from fedrts.inspection import evaluate_run

    metrics = evaluate_run(run_dir, data, data_dir)
    print(json.dumps(metrics) if as_json else "\n".join(f"{name} {value:.4f}" for name, value in metrics.items()))


class Format(enum.StrEnum):
    safetensors = "safetensors"
    dense = "dense"


@app.command()
def export(
    run_dir: RunDir,
    format: Annotated[Format, typer.Option(help="safetensors, or dense: a PyTorch state dict (.pt).")] = Format.safetensors,
    out: Annotated[Path | None, typer.Option(help="File to write; default export.safetensors or export.pt in the run folder.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Write the model of a run folder for use elsewhere; both forms load with `load_state_dict(strict=True)`."""
    from fedrts.inspection import export_run

    print(export_run(run_dir, format.value, out, data_dir))


def _interruptible(play: Callable[[Observer], Result], folder: Path, quiet: bool) -> None:
    """Play a run for a person: progress, and a word on how to go on after Ctrl-C or SIGTERM."""
    import signal

    from fedrts.observe import Silent
    from fedrts.observe.console import ConsoleObserver

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        play(Silent() if quiet else ConsoleObserver())
    except KeyboardInterrupt:
        print(f"interrupted; continue with: fedrts resume {folder}", file=sys.stderr)
        sys.exit(130)


def _whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    """`3,32,32` as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{flag} takes whole numbers with commas between them, such as 3,32,32 (got '{text}')") from None


def _print_cost(found: Cost) -> None:
    """One table for each accounting, so that nobody compares across them by accident."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fedrts.accounting import ACCOUNTINGS

    console = Console(highlight=False)
    console.print(
        f"{found.method} · {found.model} with {found.parameters:,} parameters, {found.links:,} prunable · density {found.density:g} · "
        f"{found.macs:,.0f} MAC a sample of shape {list(found.input_shape)} · {found.samples:,} samples, {found.epochs} epochs, "
        f"batches of {found.batch_size}"
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


def _print_csv(rows: list[dict[str, Any]]) -> None:
    import csv

    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _described(name: str, function: Callable[..., Any], own: tuple[str, ...]) -> dict[str, Any]:
    import inspect as reflection

    parameters = reflection.signature(function).parameters.values()
    return {"name": name, "what it is": _first_line(function), "options": {p.name: p.default for p in parameters if p.name not in own}}


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").strip().partition("\n")[0]


def _print_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console().print(table)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={entry}" for key, entry in value.items())
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
