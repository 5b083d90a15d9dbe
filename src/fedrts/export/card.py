"""Model cards: data, training, cost, and quality by class and client, from the run folder alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from fedrts.config import CUSTOM, Experiment
from fedrts.errors import InputError
from fedrts.files import require_plain
from fedrts.registry import IMPORT_PATH
from fedrts.runs.folder import RunFolder
from fedrts.tasks.metrics import Metric, of_run

LISTED = 20
"""Clients up to which each has a row; of more there is a summary."""


def card(folder: RunFolder, experiment: Experiment, use: str) -> str:
    """Return README.md of a model, with the front matter of model hubs; `use` is a block of code that loads the model."""
    summary, history = folder.summary(), folder.history()
    told = summary or next((line for line in reversed(history) if line.get(of_run(None, history)[0].name) is not None), {})
    metrics = [metric for metric in of_run(summary, history) if told.get(metric.name) is not None]
    parts = [
        "---\nlibrary_name: transformers\ntags:\n- fedrts\n- federated-learning\n- sparse\n---",
        f"# {_plain(experiment.data)} by {experiment.method}",
        f"A sparse model, trained by federated learning with [fedrts](https://github.com/fedrts/fedrts): {_sentence(experiment, told)}",
        f"```python\n{use}\n```",
        "## Training\n\n" + _table(_training(experiment, told, history)),
        "## Results\n\n" + _table([("metric", "value"), *((metric.title, metric.text(told[metric.name])) for metric in metrics)]),
    ]
    fairness = _read(folder, "fairness.json")
    if fairness.get("classes"):
        rows = [(entry["class"], entry["samples"], _share(entry["accuracy"])) for entry in fairness["classes"]]
        parts.append("### By class\n\nOn the test set.\n\n" + _table([("class", "samples", "accuracy"), *rows]))
    if fairness.get("clients"):
        parts.append("### By client\n\n" + _clients(fairness["clients"], _read(folder, "clients.json"), metrics))
    parts.append("## Privacy\n\n" + _privacy(_read(folder, "privacy.json")))
    return "\n\n".join(parts) + "\n"


def _sentence(e: Experiment, told: Mapping[str, Any]) -> str:
    density = told.get("density", e.density)
    return f"{density:.1%} of its trained parameters are not zero." if density < 1 else "all of its parameters are in use."


def _training(e: Experiment, told: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    played = [line for line in history if line["round"] >= 0]
    way = {key: sum(line[f"{key}_bytes"] for line in history) for key in ("upload", "download")}
    how = "" if e.data == CUSTOM else f", divided by {e.clients.partition}"
    optimizer = f"{e.train.optimizer}, rate {e.train.lr:g}, batches of {e.train.batch_size}, {e.train.epochs} epochs a round"
    return [
        ("what", "value"),
        ("data", _plain(e.data)),
        ("begun from", _plain(e.model)),
        ("method", e.method),
        ("density", f"{told.get('density', e.density):.4g}"),
        ("rounds", f"{len(played)} of {e.rounds}" if len(played) < e.rounds else str(e.rounds)),
        ("clients", f"{e.clients.total}, {e.clients.per_round} a round{how}"),
        ("local training", optimizer),
        ("sent by clients", f"{way['upload']:,} bytes"),
        ("sent to clients", f"{way['download']:,} bytes"),
        *([("of dense averaging", f"{told['comm_ratio']:.3f}")] if told.get("comm_ratio") is not None else []),
        ("seed", str(e.seed)),
        ("version", f"fedrts {told['version']}" if "version" in told else "unknown"),
    ]


def _clients(clients: Sequence[Mapping[str, Any]], held: Any, metrics: Sequence[Metric]) -> str:
    """Describe each client's own data or, for many clients, the worst, the median and the best."""
    metric = next((entry for entry in metrics if any(entry.name in client for client in clients)), None)
    if metric is None:
        return "Not known."
    names = {entry["client"]: entry.get("name") for entry in held} if isinstance(held, list) else {}
    known = [(client, client[metric.name]) for client in clients if client.get(metric.name) is not None]
    where = "On the data that each client holds (the model was trained on it).\n\n"
    if len(known) <= LISTED:
        rows: list[tuple[Any, ...]] = [
            (_cell(names.get(client["client"]) or client["client"]), client["samples"], metric.text(value)) for client, value in known
        ]
        return where + _table([("client", "samples", metric.label), *rows])
    values = sorted((value for _, value in known), reverse=metric.lower_is_better)
    spread = [("worst", metric.text(values[0])), ("median", metric.text(median(values))), ("best", metric.text(values[-1]))]
    return where + _table([(f"of {len(values)} clients", metric.label), *spread])


def _privacy(privacy: Mapping[str, Any]) -> str:
    if not privacy:
        return "No differential privacy was applied: updates, and so the model, may tell of single records."
    epsilon = privacy["most"]["epsilon"]["total"]
    bound = "without bound" if epsilon is None else f"ε = {epsilon:.4g} at δ = {privacy['delta']:g}"
    most = f"The client that gave most gave away {bound}, in {privacy['most']['messages']} messages."
    return f"Uploads were protected by local differential privacy; {privacy['neighbours']} are neighbours. {most}"


def _read(folder: RunFolder, name: str) -> Any:
    """Read a JSON file of the run; empty if it is missing."""
    file = folder.path / name
    require_plain(file)
    try:
        return json.loads(file.read_bytes()) if file.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {file}: {error}; restore it, or delete it to leave that out of the card") from error


def _plain(name: str) -> str:
    """Return a name without the folders of its author."""
    if name == CUSTOM:
        return "given in Python"
    scheme, colon, path = name.partition(":")
    return name if not colon or IMPORT_PATH.fullmatch(name) else f"{scheme}:{path.rstrip('/').rpartition('/')[2]}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _cell(text: object) -> str:
    """Escape a client's name for a table cell."""
    return str(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _table(rows: Sequence[Sequence[Any]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
