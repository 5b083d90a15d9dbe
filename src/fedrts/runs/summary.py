"""What a run came to: clients.json and summary.json."""

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

LISTED = 10_000
"""Clients at most that clients.json describes: it is for people and plots."""


def describe_clients(held: Data, parts: Sequence[Tensor], ours: bool = True) -> list[dict[str, Any]]:
    """clients.json: what every client holds (of more than `LISTED`, the first); of data that is not ours, no labels."""
    labels = held.y.cpu()
    counted = ours and has_classes(labels, held.classes)
    return [
        {
            "client": client,
            "samples": len(rows),
            "labels": torch.bincount(labels[rows.cpu()], minlength=held.classes).tolist() if counted else None,
        }
        for client, rows in enumerate(parts[:LISTED])
    ]


def describe_privacy(run: Assembled, ledger: ClientRecords) -> dict[str, Any]:
    """privacy.json: the protection of uploads, what one message is worth, and what the client that gave most has given away."""
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


def summarise(run: Assembled, state: State, ledger: ClientRecords, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """summary.json: a function of the final state, the ledger and the history."""
    experiment, layout = run.experiment, run.layout
    federated = history[-1].get("federated") if history else None
    metrics = {**(federated or {}).get("mean", {}), **run.plan.engine.evaluate(state)}
    judge = "accuracy" if run.data.valid_x is None else "valid_accuracy"
    evaluated = [line for line in history if line.get(judge) is not None]
    last = [line["accuracy"] for line in history[-10:] if line["accuracy"] is not None]
    upload, download = (sum(line[f"{way}_bytes"] for line in history) for way in ("upload", "download"))
    dense = state.values.element_size() * layout.length * ledger.messages
    seconds = sum(line["seconds"] for line in history)
    samples = sum(run.training.samples(len(run.rows[client])) for line in history if line["round"] >= 0 for client in line["clients"])
    return {
        "method": experiment.method,
        "data": experiment.data,
        "model": experiment.model,
        "seed": experiment.seed,
        "rounds": experiment.rounds,
        "density_target": experiment.density,
        "density": rounds.density(layout, state.mask),
        "accuracy": metrics.get("accuracy"),
        "accuracy_last10": sum(last) / len(last) if last else None,
        "best_accuracy": max(evaluated, key=lambda line: line[judge])["accuracy"] if evaluated else None,
        "loss": metrics.get("loss"),
        "perplexity": metrics.get("perplexity"),
        "perplexity_corpus": metrics.get("perplexity_corpus"),
        "upload_bytes": upload,
        "download_bytes": download,
        "comm_ratio": (upload + download) / dense,
        "paper_comm_mb": paper_megabytes(run, state),
        "flops": sum(line["flops"] for line in history),
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "rejected_replies": sum(entry["reason"] not in EXCUSED for line in history for entry in line["rejected"]),
        "version": fedrts.__version__,
        **({"federated": federated} if federated else {}),
        **({"given": describe_given(run)} if experiment.data == CUSTOM else {}),
    }


def describe_given(run: Assembled) -> dict[str, str]:
    """What was given in Python and has no name in the experiment, so that runs of different problems can be told apart."""
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
