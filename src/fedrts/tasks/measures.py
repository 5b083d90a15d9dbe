"""How the built-in metrics are measured: by sums over batches where possible, otherwise by functions of all rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedrts import trees
from fedrts.errors import InputError

IGNORED = -100
"""A label that does not count, as in PyTorch and transformers."""
Judgement = Callable[[Any, Any], "float | Tensor"]
"""(outputs, targets) of all rows → a number."""


@runtime_checkable
class Meter(Protocol):
    """Evaluates one test set, batch by batch; new for each."""

    def update(self, output: Any, target: Any) -> None:
        """Process the outputs `[m, …]` and targets `[m, …]` of a batch."""
        ...

    def compute(self) -> float:
        """Return the metric of all batches; NaN if it is undefined."""
        ...


class AllRows:
    """Keep all rows, on the CPU, for a function of them."""

    def __init__(self, function: Judgement) -> None:
        self.function = function
        self.outputs: list[trees.Tensors] = []
        self.targets: list[trees.Tensors] = []

    def update(self, output: Any, target: Any) -> None:
        self.outputs.append(_kept(output))
        self.targets.append(_kept(target))

    def compute(self) -> float:
        return float(self.function(trees.joined(self.outputs), trees.joined(self.targets)))


def _kept(part: Any) -> trees.Tensors:
    return trees.mapped(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, part)


class RightAnswers:
    """The share of samples that `count(output, target)` counts as right; by default, of labels with the largest output."""

    def __init__(self, count: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        self.count = count
        self.right, self.samples = 0.0, 0

    def update(self, output: Any, target: Any) -> None:
        if self.count is None:
            output, target = compared(output, target)
        self.right += float((self.count or labelled_rightly)(output, target))
        self.samples += trees.count(target)

    def compute(self) -> float:
        return self.right / self.samples if self.samples else math.nan


def labelled_rightly(output: Any, target: Any) -> Tensor:
    """Count the outputs `[m, classes]` that are largest at the label `[m]`."""
    output, target = compared(output, target)
    if output.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        forms = f"outputs {list(output.shape)} and {str(target.dtype).removeprefix('torch.')} targets {list(target.shape)}"
        raise InputError(f"what is a right answer among {forms}? give `correct(output, target)`, the number of them in a batch")
    right: Tensor = (output.argmax(-1) == target).sum()
    return right


class MeanError:
    """The mean of `of(output − target)` over all numbers."""

    def __init__(self, of: Callable[[Tensor], Tensor], then: Callable[[float], float] = float) -> None:
        self.of, self.then = of, then
        self.sum, self.numbers = 0.0, 0

    def update(self, output: Any, target: Any) -> None:
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

    def update(self, output: Any, target: Any) -> None:
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


def compared(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Return the output tensor and the target tensor that a built-in metric compares."""
    given = {"output": trees.answer(output), "target": target}
    found = [part for part in given.values() if isinstance(part, Tensor)]
    for what, part in given.items():
        if not isinstance(part, Tensor):
            raise InputError(f"the {what} is a {type(part).__name__}, not one tensor: give a metric of your own that knows its parts")
    return _padding_apart(found[0], found[1])


def _padding_apart(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Labels that count, and their outputs: none of padding (−100); logits `[m, time, classes]` and labels `[m, time]` are one a row."""
    if target.is_floating_point() or target.dim() > 2:
        return output, target
    per_token = target.dim() == 2 and output.dim() == 3 and output.shape[:2] == target.shape
    if per_token and (output.shape[0], output.shape[2]) != tuple(target.shape):  # otherwise the classes may be the axis in the middle
        output, target = output.flatten(0, 1), target.flatten()
    if target.dim() == 1 and len(output) == len(target) and bool((target == IGNORED).any()):
        output, target = output[target != IGNORED], target[target != IGNORED]
    return output, target


def beside(output: Any, target: Any) -> Tensor:
    """Return the outputs in the shape of the targets: `[m, 1]` may stand for `[m]`."""
    output, target = compared(output, target)
    if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)
    if output.shape != target.shape:
        raise InputError(
            f"outputs {list(output.shape)} and targets {list(target.shape)} differ in form: a difference needs one number each"
        )
    found: Tensor = output
    return found


class MacroF1:
    """F1 of every class that occurs among labels or predictions, 2·right / (predicted + there), and the mean over these.

    Where targets are `[m, labels]`, each there or not, it is the F1 of every label that occurs, and the mean over these.
    """

    def __init__(self) -> None:
        self.right = self.predicted = self.there = torch.zeros(0, dtype=torch.int64)

    def update(self, output: Any, target: Any) -> None:
        found = _counted(output, target, len(self.there))
        pairs = zip((self.right, self.predicted, self.there), found, strict=True)
        self.right, self.predicted, self.there = (torch.nn.functional.pad(old, (0, len(new) - len(old))) + new for old, new in pairs)

    def compute(self) -> float:
        both = self.predicted + self.there
        return float((2 * self.right[both > 0].double() / both[both > 0]).mean())


class MicroF1(MacroF1):
    """F1 of all decisions together, 2·Σ right / Σ (predicted + there): of one class per sample it is the accuracy."""

    def compute(self) -> float:
        both = int((self.predicted + self.there).sum())
        return 2 * int(self.right.sum()) / both if both else math.nan


def _counted(output: Any, target: Any, classes: int) -> list[Tensor]:
    """Count for every class (at least `classes` of them) how often it was rightly predicted, predicted, and present."""
    output, target = compared(output, target)
    if _several(target):
        predicted, there = (beside(output, target) > 0).cpu(), (target > 0).cpu()
        return [part.sum(0) for part in (predicted & there, predicted, there)]
    predicted, there = said(output, target).cpu(), target.long().flatten().cpu()
    classes = max(classes, int(predicted.max()) + 1, int(there.max()) + 1)
    return [torch.bincount(labels, minlength=classes) for labels in (predicted[predicted == there], predicted, there)]


def said(output: Any, target: Any) -> Tensor:
    """Return the predicted class of every target: the largest of `[m, classes, …]`, or, for one output each, 1 above 0 (a logit)."""
    output, target = compared(output, target)
    if output.dim() == target.dim() + 1 and output.shape[1] > 1:
        largest: Tensor = output.argmax(1).flatten()
        return largest
    return (beside(output, target) > 0).long().flatten()


def area_under_roc(output: Any, target: Any) -> float:
    """The chance that a sample of a class scores above one of another: of two classes that of the second, of more the mean over classes.

    `[m]` or `[m, 1]` are scores of two classes, `[m, classes]` logits; where targets are `[m, labels]`, every column is a score of its own
    label, and the mean is over labels. A class or label that no sample has, or all of them, is left out.
    """
    output, target = compared(output, target)
    if _several(target):
        areas = [_area(scores, own == 1) for scores, own in zip(beside(output, target).t(), target.t(), strict=True)]
        return _mean(areas)
    labels = target.long().flatten()
    if output.dim() == 2 and output.shape[1] > 2:
        shares = output.double().softmax(1)
        areas = [_area(shares[:, label], labels == label) for label in range(output.shape[1])]
        return _mean(areas)
    scores = output[:, 1] - output[:, 0] if output.dim() == 2 and output.shape[1] == 2 else beside(output, target)
    return _area(scores.flatten(), labels == 1)


def _several(target: Tensor) -> bool:
    """Whether every sample has several labels, each present or not `[m, labels]`."""
    return target.dim() == 2 and target.shape[1] > 1


def _mean(values: list[float]) -> float:
    """Return the mean of the defined ones."""
    there = [value for value in values if not math.isnan(value)]
    return sum(there) / len(there) if there else math.nan


def _area(scores: Tensor, own: Tensor) -> float:
    """Mann and Whitney's statistic over all pairs; equal scores share their ranks."""
    positive, negative = int(own.sum()), int((~own).sum())
    if not positive or not negative:
        return math.nan
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[place]
    return (float(ranks[own].sum()) - positive * (positive + 1) / 2) / (positive * negative)
