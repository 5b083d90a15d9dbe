"""How well does the model serve each class and client? fairness.json, written once for the final model.

A class is judged on its samples of the test set. A client is judged twice: on the data that it holds (which the model was trained on, here
without augmentation), and, where targets are labels, on new data like its own: the classes' test accuracies weighted by its label counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedrts import trees
from fedrts.data.contract import Data, has_classes
from fedrts.engines.threads import threads_for
from fedrts.runs.build import Assembled
from fedrts.sparse.mode import training
from fedrts.tasks import Classification, Metrics
from fedrts.tasks.measures import labelled_rightly
from fedrts.trees import Tensors

TellProgress = Callable[[int, int], None]


MOST = 5
"""Clients are judged on at most this many times the samples of the test set, to keep this cheap."""


_FEWEST = 16
"""Samples of a client that are always looked at, if it has them."""


_CLIENTS = 10_000
"""Clients that are judged at most: the first, as in clients.json."""


_ON_CPU = 64
"""Samples of one forward pass on a CPU."""


def judged(run: Assembled, tell: TellProgress = lambda done, total: None) -> dict[str, Any]:
    """Evaluate the run's module by class and by client; `share` is the evaluated part of the clients' samples.

    `tell(done, total)` hears of the samples that were looked at, and of all that will be.
    """
    data = run.data
    share = min(1.0, MOST * len(data.test_y) / max(sum(run.rows.sizes), 1))
    held = run.rows[:_CLIENTS]
    seen = [spread_out(rows, share) for rows in held]
    labels = _labels(data)
    of_class = [] if labels is None else torch.bincount(labels, minlength=data.classes).tolist()
    total, before = sum(of_class) + sum(map(len, seen)), 0

    def step(count: int) -> None:
        nonlocal before
        before += count
        tell(before, total)

    with threads_for(run.bench.batch_macs):
        look = _Look(data, run.module, _at_once(run), step)
        classes: list[dict[str, Any]] | None = None
        if labels is not None:
            found = look.apart(data.test_x, data.test_y, labels.argsort(stable=True), of_class)
            right = [metrics.get("accuracy") for metrics in found]
            if any(share is not None for share in right):
                classes = [{"class": label, "samples": of_class[label], "accuracy": share} for label, share in enumerate(right)]
        served = look.apart(data.x, data.y, torch.cat([rows.cpu() for rows in seen]), list(map(len, seen)))
    clients: list[dict[str, Any]] = [
        {"client": client, "samples": len(rows), **metrics} for client, (rows, metrics) in enumerate(zip(held, served, strict=True))
    ]
    if classes is not None:
        y = data.y.cpu()
        for entry, rows in zip(clients, held, strict=True):
            entry["expected_accuracy"] = expected(torch.bincount(y[rows.cpu()], minlength=len(classes)).tolist(), classes)
    return {"share": share, "classes": classes, "clients": clients}


def _labels(data: Data) -> Tensor | None:
    """Return the test set's labels, if there are few enough classes to report on each."""
    return data.test_y.cpu() if all(has_classes(labels, data.classes) for labels in (data.y, data.test_y)) else None


@dataclass(frozen=True)
class _Look:
    """A model that evaluates every sample once."""

    data: Data
    module: nn.Module
    at_once: int
    step: Callable[[int], None]

    def apart(self, x: Tensors, y: Tensors, rows: Tensor, sizes: Sequence[int]) -> list[Metrics]:
        """Return metrics of each group of `rows`; an empty group has none."""
        rows = rows.to(self.data.device)
        if type(self.data.task) is Classification and all(isinstance(part, Tensor) for part in (x, y)):  # a further metric need not add up
            return self._streamed(self.data.task, x, y, rows, sizes)
        found = []
        for group in rows.split(list(sizes)):
            found.append(self.data.judge(self.module, trees.at(x, group), trees.at(y, group), self.at_once) if len(group) else {})
            self.step(len(group))
        return found

    def _streamed(self, task: Classification, x: Tensors, y: Tensors, rows: Tensor, sizes: Sequence[int]) -> list[Metrics]:
        """The same for losses and right answers that add up: batches need not end where groups do."""
        count = task.correct or labelled_rightly
        group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        sums = [[0.0, 0.0] for _ in sizes]
        with training(self.module, False), torch.no_grad():
            for batch, members in zip(rows.split(self.at_once), group.split(self.at_once), strict=True):
                output, target = trees.answer(self.module(self.data.inputs(x[batch]))), self.data.targets(y[batch])
                owners, lengths = members.unique_consecutive(return_counts=True)
                parts = lengths.tolist()
                for owner, answers, truth in zip(owners.tolist(), output.split(parts), target.split(parts), strict=True):
                    sums[owner][0] += float(task.criterion(answers, truth)) * len(answers)
                    sums[owner][1] += float(count(answers, truth))
                self.step(len(batch))
        pairs = zip(sizes, sums, strict=True)
        return [{"loss": loss / size, "accuracy": correct / size} if size else {} for size, (loss, correct) in pairs]


def _at_once(run: Assembled) -> int:
    """Return samples per forward pass: on a CPU, no more than fit its caches with their activations."""
    most = run.experiment.eval.batch_size
    return min(most, _ON_CPU) if run.data.device.type == "cpu" else most


def spread_out(rows: Tensor, share: float) -> Tensor:
    """Return a `share` of the rows, at least 16, evenly spread over them."""
    count = min(len(rows), max(_FEWEST, math.ceil(len(rows) * share)))
    return rows[torch.arange(count, device=rows.device) * len(rows) // max(count, 1)]


def expected(labels: Sequence[int], classes: Sequence[dict[str, Any]]) -> float | None:
    """Return Σ_c share of label c · test accuracy of class c, over the classes in the test set."""
    pairs = zip(labels, (entry["accuracy"] for entry in classes), strict=True)
    there = [(count, share) for count, share in pairs if count and share is not None]
    return sum(count * share for count, share in there) / sum(count for count, _ in there) if there else None
