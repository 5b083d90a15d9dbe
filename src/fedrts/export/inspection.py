"""Looking at a run folder: what it holds, and how good its model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedrts import config, data
from fedrts.api import loading
from fedrts.errors import InputError
from fedrts.runs import checkpoint
from fedrts.runs.build import with_metrics
from fedrts.runs.folder import RunFolder, Trust, check_saved, resume_command
from fedrts.runs.lost_units import lost_units
from fedrts.tasks import Metrics
from fedrts.tasks.metrics import of_run


def inspect_run(path: Path) -> dict[str, Any]:
    """Return progress, results and layer densities of a finished or unfinished run."""
    folder = RunFolder(path)
    settings = config.from_file(folder.experiment_file())
    experiment = config.validated(config.Experiment, settings)
    folder.verify()
    history, summary = folder.history(), folder.summary()
    names = ("method", "data", "model", "seed", "rounds")
    content: dict[str, Any] = {name: getattr(experiment, name) for name in names}
    unfinished = "running" if folder.is_running else f"unfinished; continue with: {resume_command(path, settings)}"
    content["state"] = "finished" if summary else unfinished
    content["rounds_played"] = sum(line["round"] >= 0 for line in history)
    metrics = of_run(summary, history)
    source = summary or next((line for line in reversed(history) if line.get(metrics[0].name) is not None), {})
    shown = [key for metric in metrics if metric.told or metric is metrics[0] for key in (metric.name, f"{metric.name}_last10")]
    for name in ("density", *shown, "comm_ratio"):
        if source.get(name) is not None:
            content[name] = source[name]
    for way in ("upload_bytes", "download_bytes"):
        content[way] = sum(line[way] for line in history)
    if warnings := lost_units(folder.topology(), history):
        content["warnings"] = warnings
    content["layers"] = [
        {"layer": name, "links": size, "active": active, "density": active / size} for name, size, active in _layers(folder)
    ]
    return content


def _layers(folder: RunFolder) -> list[tuple[str, int, int]]:
    """Return (name, links, active) of every prunable layer, from the newest checkpoint."""
    saved = checkpoint.load(folder.path / "checkpoint", check=check_saved)
    if saved is None:
        return []
    return list(zip(saved.facts["identity"]["layers"], saved.state.mask.sizes, saved.state.mask.counts, strict=True))


def evaluate_run(
    path: Path, data_name: str | None = None, data_dir: Path | None = None, trust: Trust = False, average: bool = False
) -> Metrics:
    """Evaluate a run's model, or the average of its late ones, on its test set or on another data set of the same shapes."""
    model = loading.load(path, data_dir=data_dir, average=average, trust=trust)
    with RunFolder(path).trusted(trust):
        experiment = config.resolve(config.from_file(RunFolder(path).experiment_file()), loading.ANYWHERE)
        held = None if data_name else with_metrics(data.load(experiment.data, experiment.data_options, data_dir), experiment)
    if held is None:  # the user's own word
        held = data.load(str(data_name), {}, data_dir)
    if not len(held.test_y):
        raise InputError(f"'{data_name or experiment.data}' has no test data here: name a data set that has with --data")
    try:
        return held.evaluate(model.cpu(), experiment.eval.batch_size)
    except (RuntimeError, IndexError) as error:
        raise InputError(f"the model of {path} cannot read the data set '{data_name}': {str(error).splitlines()[0]}") from error
