"""Whom a model serves how well: fairness.json, made once of the final model.

A class is judged on its samples of the test set. A client is judged twice: on the data that it holds (which the model was trained on, here
without augmentation), and, where targets are labels, on new data like its own: the classes' test accuracies weighted by its label counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedrts.assemble import Assembled
from fedrts.data.contract import has_classes
from fedrts.engines.threads import threads_for

MOST = 5
"""Clients are judged on at most so many times the samples of the test set, to keep this cheap."""
_FEWEST = 16
"""Samples of a client that are always looked at, if it has them."""
_CLIENTS = 10_000
"""Clients that are judged at most: the first, as in clients.json."""


def judged(run: Assembled) -> dict[str, Any]:
    """The run's module by class and by client; `share` is the part of the clients' samples that was looked at."""
    with threads_for(run.bench.batch_macs):
        classes = _by_class(run)
        share = min(1.0, MOST * len(run.data.test_y) / max(sum(run.rows.sizes), 1))
        clients = [_judged(run, client, rows, share, classes) for client, rows in enumerate(run.rows[:_CLIENTS])]
    return {"share": share, "classes": classes, "clients": clients}


def _by_class(run: Assembled) -> list[dict[str, Any]] | None:
    data = run.data
    if not all(has_classes(labels, data.classes) for labels in (data.y, data.test_y)):
        return None
    found = []
    for label in range(data.classes):
        rows = (data.test_y == label).nonzero().flatten()
        entry: dict[str, Any] = {"class": label, "samples": len(rows), "accuracy": None}
        if len(rows):
            entry["accuracy"] = data.judge(run.module, data.test_x[rows], data.test_y[rows], run.experiment.eval.batch_size)["accuracy"]
        found.append(entry)
    return found


def _judged(run: Assembled, client: int, rows: Tensor, share: float, classes: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    data = run.data
    entry: dict[str, Any] = {"client": client, "samples": len(rows)}
    seen = spread_out(rows, share).to(data.x.device)
    if len(seen):
        entry |= data.judge(run.module, data.x[seen], data.y[seen], run.experiment.eval.batch_size)
    if classes is not None:
        entry["expected_accuracy"] = expected(
            torch.bincount(data.y[rows.to(data.y.device)].cpu(), minlength=len(classes)).tolist(), classes
        )
    return entry


def spread_out(rows: Tensor, share: float) -> Tensor:
    """A `share` of the rows, but no fewer than 16, evenly spread over them."""
    count = min(len(rows), max(_FEWEST, math.ceil(len(rows) * share)))
    return rows[torch.arange(count, device=rows.device) * len(rows) // max(count, 1)]


def expected(labels: Sequence[int], classes: Sequence[dict[str, Any]]) -> float | None:
    """Σ_c share of label c · test accuracy of class c, over the classes that the test set has."""
    pairs = [(count, entry["accuracy"]) for count, entry in zip(labels, classes, strict=True) if count and entry["accuracy"] is not None]
    return sum(count * accuracy for count, accuracy in pairs) / sum(count for count, _ in pairs) if pairs else None
