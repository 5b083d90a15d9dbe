"""Tasks by name, made of the training targets: `fedrts.train(task="regression")`, `data_options.task = "regression"`.

One of your own is a function of the targets under `@fedrts.tasks.named.register("name")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedrts import trees
from fedrts.errors import InputError
from fedrts.registry import Registry
from fedrts.tasks import Classification, Continuation, Prediction, Task, TokenLabels, logits
from fedrts.tasks.measures import beside
from fedrts.trees import Tensors

Maker = Callable[[Tensor], Task]
"""Training targets `[n, …]` of all clients → the task."""

tasks: Registry[Maker] = Registry("task")
register = tasks.register
names = tasks.names


def made(name: str, targets: Tensors) -> Task:
    """Make the task of a name for these training targets."""
    maker = tasks.get(name)
    if not isinstance(targets, Tensor):
        raise InputError(f"task = '{name}' takes one tensor of targets, and these are several: give a loss of your own")
    return maker(targets)


@register("classification")
def classification(targets: Tensor) -> Task:
    """One label per sample: cross-entropy, accuracy."""
    _labels("classification", targets)
    return Classification()


@register("imbalanced")
def imbalanced(targets: Tensor) -> Task:
    """One label per sample, some rare: every class has equal weight in the loss; metrics F1 (macro, leads), AUROC and accuracy."""
    counts = torch.bincount(_labels("imbalanced", targets)).double()
    weights = len(targets) / ((counts > 0).sum() * counts.clamp(min=1))
    return Prediction(partial(balanced, weights=tuple(weights.tolist())), metrics=("f1", "auroc", "accuracy"))


@register("language")
def language(targets: Tensor) -> Task:
    """Tokens `[n, time]` that are also the inputs, like `labels` in transformers: each predicts the next; −100 (padding) does not count."""
    _tokens("language", targets)
    return Continuation()


@register("tokens")
def tokens(targets: Tensor) -> Task:
    """A label for each token `[n, time]`; −100 (padding, or a token without a label) does not count: accuracy."""
    _tokens("tokens", targets)
    return TokenLabels()


@register("multilabel")
def multilabel(targets: Tensor) -> Task:
    """Several labels per sample, each present or not `[n, labels]`; metrics F1 (macro, leads), micro F1 and AUROC."""
    if targets.dim() != 2 or not bool(((targets == 0) | (targets == 1)).all()):
        raise InputError(f"task = 'multilabel' takes targets [n, labels] of zeros and ones, not {list(targets.shape)} of {targets.dtype}")
    return Prediction(each_or_not, metrics=("f1", "f1_micro", "auroc"))


@register("regression")
def regression(targets: Tensor) -> Task:
    """Numbers `[n]` or `[n, k]`: squared error of standardised targets; metrics MAE (leads), RMSE and R² in the targets' units."""
    if targets.dim() not in (1, 2):
        raise InputError(f"task = 'regression' takes targets [n] or [n, k], not {list(targets.shape)}: give a loss and metrics of your own")
    columns = targets.double().reshape(len(targets), -1)
    if not (finite := columns.isfinite().all(1)).all():
        raise InputError(f"task = 'regression': target {int(finite.long().argmin()) + 1:,} of all clients' is not finite: leave it out")
    scale = columns.std(0, correction=0)
    return Regression(centre=tuple(columns.mean(0).tolist()), scale=tuple(torch.where(scale > 0, scale, 1.0).tolist()))


def balanced(output: Any, target: Tensor, weights: tuple[float, ...]) -> Tensor:
    """Cross-entropy of labels `[m]`, weighted by class; a class missing from training has the mean weight."""
    answers = logits(output)
    losses = F.cross_entropy(answers, target.long(), reduction="none")
    known = answers.new_ones(answers.shape[-1])
    known[: len(weights)] = answers.new_tensor(weights)[: len(known)]
    loss: Tensor = (losses * known[target.long()]).mean()
    return loss


def each_or_not(output: Any, target: Tensor) -> Tensor:
    """Binary cross-entropy of logits `[m, labels]`."""
    return F.binary_cross_entropy_with_logits(beside(output, target), target.to(logits(output).dtype))


def squared(output: Any, target: Tensor) -> Tensor:
    """Mean squared error; outputs `[m, 1]` may stand for `[m]`."""
    return F.mse_loss(beside(output, target), target)


@dataclass(frozen=True)
class Regression(Prediction):
    """Targets are standardised for the loss, (y − centre) / scale, and a model's outputs are such numbers; metrics have y's own units."""

    criterion: Callable[[Any, Any], Tensor] = squared
    metrics: tuple[Any, ...] = ("mae", "rmse", "r2")
    centre: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)

    def _units(self, like: Tensor) -> tuple[Any, Any]:
        if len(self.centre) == 1:
            return self.centre[0], self.scale[0]
        return like.new_tensor(self.centre), like.new_tensor(self.scale)

    def loss(self, module: nn.Module, x: Tensors, y: Tensors, *, temperature: float = 1.0, twice: bool = False) -> Tensor:
        output = logits(trees.called(module, x))
        centre, scale = self._units(output)
        return self.criterion(output / temperature, (y.to(output.dtype) - centre) / scale)

    def judged(self, module: nn.Module, x: Tensors, y: Tensors) -> tuple[float, Any]:
        output = logits(trees.called(module, x))
        centre, scale = self._units(output)
        return float(self.criterion(output, (y.to(output.dtype) - centre) / scale)), output * scale + centre


def _tokens(name: str, targets: Tensor) -> None:
    if targets.dim() != 2 or targets.is_floating_point():
        raise InputError(f"task = '{name}' takes whole numbers [n, time], not {targets.dtype} targets of shape {list(targets.shape)}")


def _labels(name: str, targets: Tensor) -> Tensor:
    if targets.dim() != 1 or targets.is_floating_point() or (len(targets) and int(targets.min()) < 0):
        raise InputError(f"task = '{name}' takes one label from 0 per sample, not {targets.dtype} targets of shape {list(targets.shape)}")
    return targets.long()
