"""The results of a run: clients.json and summary.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fedrts
from fedrts.client.privacy import spent
from fedrts.config import CUSTOM
from fedrts.data.contract import Data, has_classes
from fedrts.methods.contract import State
from fedrts.runs.build import Assembled
from fedrts.runs.likeness import likeness
from fedrts.server import rounds
from fedrts.server.client_records import ClientRecords
from fedrts.server.collect import EXCUSED
from fedrts.sparse.cost import Book
from fedrts.tasks import Classification
from fedrts.tasks.metrics import Metric, described, followed, told_of

LISTED = 10_000
"""Clients at most that clients.json describes: it is for people and plots."""


def describe_clients(held: Data, parts: Sequence[Tensor], ours: bool = True) -> list[dict[str, Any]]:
    """Return clients.json: what every client holds (the first `LISTED` of many); without labels for sites' own data."""
    labels = held.y.cpu() if ours and has_classes(held.y, held.classes) else None
    names = held.owner_names if len(held.owner_names) == len(parts) else ()
    return [
        {
            "client": client,
            **({"name": names[client]} if names else {}),
            "samples": len(rows),
            "labels": None if labels is None else torch.bincount(labels[rows.cpu()], minlength=held.classes).tolist(),
        }
        for client, rows in enumerate(parts[:LISTED])
    ]


def describe_privacy(run: Assembled, ledger: ClientRecords) -> dict[str, Any]:
    """Return privacy.json: the protection of uploads, the cost of one message, and the total of the client that spent most."""
    protection = run.bench.protection
    epsilon = {counts: spent(protection, *counts) for counts in {(0, 0), *ledger.uploads.values()}}

    def given(client: int | None) -> float:
        total = epsilon[ledger.uploads.get(client, (0, 0))]["total"] if client is not None else -1.0
        return math.inf if total is None else total

    most = max([None, *sorted(ledger.uploads)], key=given)
    counts = ledger.uploads[most] if most is not None else (0, 0)
    return {
        **protection.model_dump(),
        "neighbours": "any two data sets of one client",
        "epsilon_of_a_message": spent(protection, 1, 1),
        "most": {"client": most, "messages": counts[0], "index_sets": counts[1], "epsilon": epsilon[counts]},
    }


def most_spent(run: Assembled, ledger: ClientRecords) -> float | None:
    """Return the ε of the client that has spent most so far; None: unbounded."""
    found: float | None = describe_privacy(run, ledger)["most"]["epsilon"]["total"]
    return found


def summarise(
    run: Assembled,
    state: State,
    ledger: ClientRecords,
    history: Sequence[Mapping[str, Any]],
    stopped: Mapping[str, Any] | None = None,
    restored: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """summary.json: a function of the final state, the ledger and the history.

    `stopped`: after which round, and why, before the last planned one. `restored`: of which round the state is, where it was the best.
    """
    experiment, layout = run.experiment, run.layout
    federated = history[-1].get("federated") if history else None
    metrics = {**(federated or {}).get("mean", {}), **run.plan.engine.evaluate(state)}
    declared = described(run.plan.metrics, metrics)
    known = {**dict.fromkeys(METRIC_KEYS), **_judged(declared, metrics, history, run.data.valid_x is not None)}
    upload, download = (sum(line[f"{way}_bytes"] for line in history) for way in ("upload", "download"))
    dense = state.values.element_size() * layout.length * ledger.messages
    seconds = sum(line["seconds"] for line in history)
    samples = sum(run.training.samples(len(run.rows[client])) for line in history if line["round"] >= 0 for client in line["clients"])
    return {
        "method": experiment.method,
        "data": experiment.data,
        "model": experiment.model,
        "seed": experiment.seed,
        "rounds": experiment.rounds if stopped is None else stopped["round"] + 1,
        "density_target": experiment.density,
        "density": rounds.density(layout, state.mask),
        **{key: known.pop(key) for key in METRIC_KEYS},
        "upload_bytes": upload,
        "download_bytes": download,
        "comm_ratio": (upload + download) / dense,
        "paper_comm_mb": paper_megabytes(run, state),
        "flops": sum(line["flops"] for line in history),
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "rejected_replies": sum(entry["reason"] not in EXCUSED for line in history for entry in line["rejected"]),
        "version": fedrts.__version__,
        **known,
        **{key: value for key, value in (history[-1] if history else {}).items() if key.startswith("average_")},
        **({"metrics": told} if (told := told_of(declared)) else {}),
        **({"federated": federated} if federated else {}),
        **({"given": describe_given(run)} if experiment.data == CUSTOM else {}),
        **({"stopped": dict(stopped)} if stopped else {}),
        **({"restored": dict(restored)} if restored else {}),
    }


METRIC_KEYS = ("accuracy", "accuracy_last10", "best_accuracy", "loss", "perplexity", "perplexity_corpus")
"""Keys that every summary has; null where the task has no such metric."""


def _judged(
    declared: Sequence[Metric], final: Mapping[str, float], history: Sequence[Mapping[str, Any]], validated: bool
) -> dict[str, float | None]:
    """Keys of a summary: every metric of the final model; of those that are followed the mean over the evaluations of the last ten rounds
    and the value in the best round, chosen on the validation split where there is one."""
    found: dict[str, float | None] = {}
    kept = followed(declared)
    for metric in declared:
        name = metric.name
        found[name] = final.get(name)
        if metric not in kept:
            continue
        last = [line[name] for line in history[-10:] if _is_number(line.get(name))]
        found[f"{name}_last10"] = sum(last) / len(last) if last else None
        by = f"valid_{name}" if validated else name
        evaluated = [line for line in history if _is_number(line.get(by))]
        best = min if metric.lower_is_better else max
        found[f"best_{name}"] = best(evaluated, key=lambda line: line[by]).get(name) if evaluated else None
    return found


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def describe_given(run: Assembled) -> dict[str, str]:
    """Describe what was given in Python and has no name in the experiment, to tell runs of different problems apart."""
    task = run.data.task
    named = task.criterion if isinstance(task, Classification) else task
    digest = likeness(task).partition(" ")[2][:8]
    name = getattr(named, "__name__", type(named).__name__)
    return {"model": run.layout.fingerprint, "data": run.data.fingerprint, "task": f"{name} #{digest}"}


def paper_megabytes(run: Assembled, state: State) -> float:
    """MaskMemory of one client in an outer round at t = 0, both ways, in the paper's accounting (uniform density, bitmaps)."""
    schedule = run.plan.schedule
    exchanges = run.method.exchanges(run.plan.round(schedule.first_outer, state.mask))
    book = Book.paper(run.layout, run.experiment.first_density, schedule.adjust)
    return sum(sum(run.method.published(exchange).charged(book)) for exchange in exchanges) / 1e6
