"""How the ready-made metrics are measured: sums over batches where these suffice, otherwise functions of all rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fedrts.errors import InputError

Judgement = Callable[[Tensor, Tensor], "float | Tensor"]
"""(outputs, targets) of all rows → a number."""


class Meter(Protocol):
    """Judges one test set, batch by batch; made anew for each."""

    def update(self, output: Tensor, target: Tensor) -> None:
        """See the outputs `[m, …]` and targets `[m, …]` of a batch."""
        ...

    def compute(self) -> float:
        """The metric of all batches; NaN where it is not defined."""
        ...


class AllRows:
    """Keeps all rows, on the CPU, for a function of them."""

    def __init__(self, function: Judgement) -> None:
        self.function = function
        self.outputs: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        self.outputs.append(output.detach().cpu())
        self.targets.append(target.detach().cpu())

    def compute(self) -> float:
        return float(self.function(torch.cat(self.outputs), torch.cat(self.targets)))


class RightAnswers:
    """The share of samples that `count(output, target)` counts as right."""

    def __init__(self, count: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.count = count
        self.right, self.samples = 0.0, 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.right += float(self.count(output, target))
        self.samples += len(target)

    def compute(self) -> float:
        return self.right / self.samples


def labelled_rightly(output: Tensor, target: Tensor) -> Tensor:
    """How many of the outputs `[m, classes]` are largest at the label `[m]`."""
    if output.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        forms = f"outputs {list(output.shape)} and {str(target.dtype).removeprefix('torch.')} targets {list(target.shape)}"
        raise InputError(f"what is a right answer among {forms}? give `correct(output, target)`, the number of them in a batch")
    return (output.argmax(-1) == target).sum()


class MeanError:
    """The mean of `of(output − target)` over all numbers."""

    def __init__(self, of: Callable[[Tensor], Tensor], then: Callable[[float], float] = float) -> None:
        self.of, self.then = of, then
        self.sum, self.numbers = 0.0, 0

    def update(self, output: Tensor, target: Tensor) -> None:
        errors = self.of(beside(output, target).double() - target.double())
        self.sum += float(errors.sum())
        self.numbers += errors.numel()

    def compute(self) -> float:
        return self.then(self.sum / self.numbers)


class Explained:
    """R²: 1 − Σ(output − target)² / Σ(target − mean)², the mean over the numbers that a target has.

    Sums are about the mean so far (Chan, Golub and LeVeque), so that large targets cost no digits. Of targets that are all alike it is
    1 where all outputs are right, otherwise 0.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.mean = self.around = self.wrong = torch.zeros(())

    def update(self, output: Tensor, target: Tensor) -> None:
        found, wanted = (part.double().reshape(len(target), -1) for part in (beside(output, target), target))
        count, mean = len(wanted), wanted.mean(0)
        apart, total = mean - self.mean.to(mean), self.samples + count
        within = (wanted - mean).square().sum(0)
        self.around = self.around.to(mean) + within + apart.square() * (self.samples * count / total)
        self.mean = self.mean.to(mean) + apart * (count / total)
        self.wrong = self.wrong.to(mean) + (found - wanted).square().sum(0)
        self.samples = total

    def compute(self) -> float:
        if self.samples < 2:
            return math.nan
        alike = torch.where(self.wrong == 0, 1.0, 0.0).to(self.wrong)
        return float(torch.where(self.around > 0, 1 - self.wrong / self.around, alike).mean())


def beside(output: Tensor, target: Tensor) -> Tensor:
    """The outputs in the form of the targets: `[m, 1]` may stand for `[m]`."""
    if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)
    if output.shape != target.shape:
        raise InputError(
            f"outputs {list(output.shape)} and targets {list(target.shape)} differ in form: a difference needs one number each"
        )
    return output


class MacroF1:
    """F1 of every class that occurs among labels or predictions, 2·right / (predicted + there), and the mean over these."""

    def __init__(self) -> None:
        self.right = self.predicted = self.there = torch.zeros(0, dtype=torch.int64)

    def update(self, output: Tensor, target: Tensor) -> None:
        predicted, there = said(output, target).cpu(), target.long().flatten().cpu()
        classes = max(len(self.there), int(predicted.max()) + 1, int(there.max()) + 1)
        found = [torch.bincount(labels, minlength=classes) for labels in (predicted[predicted == there], predicted, there)]
        before = [torch.nn.functional.pad(counts, (0, classes - len(counts))) for counts in (self.right, self.predicted, self.there)]
        self.right, self.predicted, self.there = (counts + more for counts, more in zip(before, found, strict=True))

    def compute(self) -> float:
        both = self.predicted + self.there
        return float((2 * self.right[both > 0].double() / both[both > 0]).mean())


def said(output: Tensor, target: Tensor) -> Tensor:
    """The class of every target: the largest of the outputs `[m, classes, …]`, or, of one output each, 1 above 0 (a logit)."""
    if output.dim() == target.dim() + 1 and output.shape[1] > 1:
        return output.argmax(1).flatten()
    return (beside(output, target) > 0).long().flatten()


def area_under_roc(output: Tensor, target: Tensor) -> float:
    """The chance that a sample of a class scores above one of another: of two classes that of the second, of more the mean over classes.

    `[m]` or `[m, 1]` are scores of two classes, `[m, classes]` logits. A class that has no sample, or all of them, is left out.
    """
    labels = target.long().flatten()
    if output.dim() == 2 and output.shape[1] > 2:
        shares = output.double().softmax(1)
        areas = [_area(shares[:, label], labels == label) for label in range(output.shape[1])]
        there = [area for area in areas if not math.isnan(area)]
        return sum(there) / len(there) if there else math.nan
    scores = output[:, 1] - output[:, 0] if output.dim() == 2 and output.shape[1] == 2 else beside(output, target)
    return _area(scores.flatten(), labels == 1)


def _area(scores: Tensor, own: Tensor) -> float:
    """Mann and Whitney's statistic over all pairs; equal scores share their ranks."""
    positive, negative = int(own.sum()), int((~own).sum())
    if not positive or not negative:
        return math.nan
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[place]
    return (float(ranks[own].sum()) - positive * (positive + 1) / 2) / (positive * negative)
