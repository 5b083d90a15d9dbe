"""What a model is trained for: the loss of a batch and the metrics of a test set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]
Metrics = dict[str, float]


class Task(Protocol):
    """A loss for training and metrics for evaluation."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean loss of a batch."""
        ...

    def evaluate(self, module: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> Metrics:
        """Metrics over all samples: `loss`, `accuracy` and, for language, `perplexity` and `perplexity_corpus`."""
        ...


@dataclass(frozen=True)
class Classification:
    """One label per sample, or any target that one's own `criterion` and `correct` understand."""

    criterion: Loss = F.cross_entropy
    correct: Callable[[Tensor, Tensor], Tensor] | None = None
    """(output, target) → number (or share, summed) of correct answers in the batch; default: arg-max equals label."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.criterion(output, target)

    def evaluate(self, module: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> Metrics:
        loss = correct = 0.0
        count = self.correct or (lambda output, target: (output.argmax(-1) == target).sum())
        for inputs, targets in _batches(module, x, y, batch_size):
            output = module(inputs)
            loss += float(self.criterion(output, targets)) * len(inputs)
            correct += float(count(output, targets))
        return {"loss": loss / len(x), "accuracy": correct / len(x)}


@dataclass(frozen=True)
class Language:
    """Next-token prediction; targets equal to `padding` do not count. Samples are stories of equal (padded) length."""

    padding: int = -100

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=self.padding)

    def evaluate(self, module: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> Metrics:
        """`perplexity`: mean over stories of exp(mean token NLL); `perplexity_corpus`: exp of the mean over all tokens."""
        perplexity = accuracy = nll = tokens = 0.0
        stories = 0
        for inputs, targets in _batches(module, x, y, batch_size):
            output = module(inputs)
            counted = targets != self.padding
            lengths = counted.sum(1)
            losses = F.cross_entropy(output.transpose(1, 2), targets, ignore_index=self.padding, reduction="none").double().sum(1)
            hits = ((output.argmax(-1) == targets) & counted).sum(1)
            some = lengths > 0
            perplexity += float((losses[some] / lengths[some]).exp().sum())
            accuracy += float((hits[some] / lengths[some]).sum())
            nll, tokens = nll + float(losses.sum()), tokens + float(lengths.sum())
            stories += int(some.sum())
        return {
            "loss": nll / tokens,
            "accuracy": accuracy / stories,
            "perplexity": perplexity / stories,
            "perplexity_corpus": math.exp(nll / tokens),
        }


def _batches(module: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches in order, with the module in evaluation mode and without gradients."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield from zip(x.split(batch_size), y.split(batch_size), strict=True)
    finally:
        module.train(was_training)
