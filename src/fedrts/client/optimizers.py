"""Local optimisers: how a client steps along its gradient. One step serves one client or many side by side.

One step serves one client and many side by side: tensors are `[..., N_all]`, with a row for each client. A class registered with
`@register("name")`, or named by import path, is all that a new one needs:

    class Signs(LocalOptimizer):
        def step(self, weights, gradient, rates, taken, past):
            weights.addcmul_(gradient.sign(), rates, value=-1)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrts.registry import Registry


@dataclass(frozen=True)
class LocalOptimizer(ABC):
    """A local optimiser, new for every client and round; its options are keys of `[train]`."""

    takes: ClassVar[frozenset[str]] = frozenset()
    """Which of the options `momentum` and `amsgrad` it goes by; a weight decay suits all."""

    usual_rate: ClassVar[float | None] = None
    """The rate where the user names this optimiser and no rate; None: the recipe's, which is for plain descent."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    amsgrad: bool = False

    @property
    def remembers(self) -> tuple[str, ...]:
        """Names of the vectors `[..., N_all]` that it keeps between steps; they start at 0."""
        return ()

    @abstractmethod
    def step(self, weights: Tensor, gradient: Tensor, rates: Tensor, taken: Tensor, past: Mapping[str, Tensor]) -> None:
        """Update the `weights [..., N_all]` in place; `gradient [..., N_all]` may be overwritten.

        The learning `rates` broadcast to the weights and are 0 where a weight must not change: where the mask has no link, or a
        parameter is frozen. `taken [...]` counts the steps, this one included. `past` has the vectors that it remembers.
        """


optimizers: Registry[type[LocalOptimizer]] = Registry("local optimiser", base=LocalOptimizer)
register = optimizers.register
names = optimizers.names
get = optimizers.get


@register("sgd")
class GradientDescent(LocalOptimizer):
    """Step along the gradient, or along a decaying sum of gradients (`momentum`)."""

    takes = frozenset({"momentum"})

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    def step(self, weights: Tensor, gradient: Tensor, rates: Tensor, taken: Tensor, past: Mapping[str, Tensor]) -> None:
        if self.weight_decay:
            gradient.add_(weights, alpha=self.weight_decay)
        if self.momentum:
            gradient = past["velocity"].mul_(self.momentum).add_(gradient)
        weights.addcmul_(gradient, rates, value=-1)


@register("adam")
class Adam(LocalOptimizer):
    """Step along the mean gradient, divided by its recent size (Kingma and Ba, 2015); AMSGrad with `amsgrad`."""

    takes = frozenset({"amsgrad"})
    usual_rate = 0.001

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("first", "second", "largest") if self.amsgrad else ("first", "second")

    def step(self, weights: Tensor, gradient: Tensor, rates: Tensor, taken: Tensor, past: Mapping[str, Tensor]) -> None:
        if self.weight_decay:
            gradient.add_(weights, alpha=self.weight_decay)
        self.descend(weights, gradient, rates, taken, past)

    def descend(self, weights: Tensor, gradient: Tensor, rates: Tensor, taken: Tensor, past: Mapping[str, Tensor]) -> None:
        """Take a step without weight decay."""
        mean = past["first"].mul_(0.9).add_(gradient, alpha=0.1)
        square = past["second"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        if self.amsgrad:
            square = torch.maximum(past["largest"], square, out=past["largest"])
        steps = taken.double()[..., None]  # 1 − 0.999 has few digits in float32
        first, second = (correction.to(weights.dtype) for correction in (1 - 0.9**steps, (1 - 0.999**steps).sqrt()))
        weights.addcmul_(mean / first / (square.sqrt() / second + 1e-8), rates, value=-1)


@register("adamw")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    def step(self, weights: Tensor, gradient: Tensor, rates: Tensor, taken: Tensor, past: Mapping[str, Tensor]) -> None:
        if self.weight_decay:
            weights.mul_(1 - self.weight_decay * rates)
        self.descend(weights, gradient, rates, taken, past)
