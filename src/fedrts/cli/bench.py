"""`fedrts bench`: latency, memory and size of a trained model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from fedrts.cli.app import Allow, AsJson, DataDir, RunDir, app
from fedrts.cli.folder import Average
from fedrts.cli.lists import numbers
from fedrts.cli.tables import print_table
from fedrts.errors import InputError

if TYPE_CHECKING:
    from fedrts.export.bench import Benched


@app.command()
def bench(
    run_dir: RunDir,
    batch_sizes: Annotated[str, typer.Option(metavar="N,N,…", help="Batch sizes to time.")] = "1,16",
    seconds: Annotated[float, typer.Option(min=0.0, help="Time per backend and batch size, in seconds.")] = 1.0,
    average: Average = False,
    data_dir: DataDir = None,
    allow: Allow = None,
    as_json: AsJson = False,
) -> None:
    """Measure latency, memory and size of a run's model on one core, with our kernels, torch and onnxruntime in turn.

    Exit code 1: some outputs differ from torch's.
    """
    from fedrts.export.bench import bench_run

    sizes = numbers("--batch-sizes", batch_sizes, int)
    if not sizes or not all(1 <= size <= 4096 for size in sizes):
        raise InputError(f"--batch-sizes takes numbers from 1 to 4096 (got '{batch_sizes}')")
    found = bench_run(run_dir, sizes, data_dir, allow or (), average, seconds)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _print(found)
    if found.disagreeing:
        typer.echo(f"error: the outputs of {' and '.join(found.disagreeing)} are not those of torch", err=True)
        raise typer.Exit(1)


def _print(found: Benched) -> None:
    sizes = sorted({size for way in found.ways.values() for size in way.latency_ms})
    rows = []
    for name, way in found.ways.items():
        if way.absent is None:
            times = {f"batch of {size} (ms)": f"{way.latency_ms[size]:.3f}" for size in sizes}
            rows.append({"way": name, "file (KB)": f"{(way.bytes or 0) / 1000:,.1f}", "memory (MB)": f"{way.memory_mb:,.1f}", **times})
    print(f"{found.model} at density {found.density:.3g}, one core")
    print_table(rows, False)
    for name, way in found.ways.items():
        if way.absent is not None:
            print(f"{name} is not here: {way.absent}")
