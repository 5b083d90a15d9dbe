"""Commands for a run folder: `fedrts inspect`, `evaluate` and `export`."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import typer

from fedrts.cli.app import Allow, AsJson, DataDir, RunDir, app
from fedrts.cli.tables import print_table

Average = Annotated[bool, typer.Option("--average", help="Use the average of the run's late models (train.average), not the last model.")]


@app.command()
def inspect(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Show the progress and results of a run, and the density of every layer."""
    from fedrts.export.inspection import inspect_run

    content = inspect_run(run_dir)
    if as_json:
        print(json.dumps(content, indent=2))
        return
    facts = {key: value for key, value in content.items() if key not in ("layers", "warnings")}
    print_table([{"run": key, str(run_dir): value} for key, value in facts.items()], False)
    if content["layers"]:
        print_table(content["layers"], False)
    for line in content.get("warnings", []):
        print(f"warning: {line}")


@app.command()
def evaluate(
    run_dir: RunDir,
    data: Annotated[str | None, typer.Option(help="Test on this data set instead of the run's.")] = None,
    average: Average = False,
    data_dir: DataDir = None,
    allow: Allow = None,
    as_json: AsJson = False,
) -> None:
    """Test the model of a run folder."""
    from fedrts.export.inspection import evaluate_run
    from fedrts.runs.folder import finite

    metrics = evaluate_run(run_dir, data, data_dir, allow or (), average)
    print(json.dumps(finite(metrics)) if as_json else "\n".join(f"{name} {value:.4f}" for name, value in metrics.items()))


class StoredValues(enum.StrEnum):
    float32 = "float32"
    float16 = "float16"
    int8 = "int8"


@app.command()
def export(
    run_dir: RunDir,
    format: Annotated[
        str,
        typer.Option(
            help="safetensors; dense: a PyTorch state dict (.pt); onnx, torch (.pt2): programs, checked against the model; "
            "sparse: an archive as small as the density; transformers: a folder for from_pretrained, with a model card."
        ),
    ] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="File or folder to write; default: export.SUFFIX in the run folder.")] = None,
    value_type: Annotated[
        StoredValues,
        typer.Option(help="Type of the stored weights: float32 (exact); int8 (onnx, sparse) and float16 (sparse) round to nearest."),
    ] = StoredValues.float32,
    average: Average = False,
    data_dir: DataDir = None,
    allow: Allow = None,
) -> None:
    """Write the model of a run folder for use elsewhere.

    Tensors load with `load_state_dict(strict=True)`; ONNX needs no PyTorch; a sparse archive is read by `fedrts.load`, and by a program
    in C that needs no Python (see the page on export).
    """
    from fedrts.export.formats import export_run

    print(export_run(run_dir, format, out, data_dir, allow or (), average, value_type.value))
