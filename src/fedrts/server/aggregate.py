"""Sums over clients: all that the server needs of them, in memory that does not grow with their number.

`RingSums` are the same of words that clients rounded: all that a server learns where sums are secure.

Robust reducers replace the mean of the `weights` alone. Clipping is a sum too; the trimmed mean and the median need every
client's weights at once, and hold them until the round is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedrts.client.order import Order
from fedrts.client.summing import SumForm
from fedrts.errors import InputError
from fedrts.methods.contract import Means
from fedrts.secure.ring import Words
from fedrts.sparse import fresh
from fedrts.wire.fields import Message, Selection, carried, changed

_PIECE = 1 << 18
_CONVERTED = 1 << 24
"""Numbers that are converted to float64 at once where memory is no cache."""
_IN_TURN = {"cpu"}
"""Kinds of devices on which clients are added one after the other: there an operation costs little more than its arithmetic."""


class Reduction(Protocol):
    """A reduction of the clients' weights to one vector other than the mean."""

    def add(self, weights: Tensor, weight: int) -> None: ...

    def merge(self, other: Any) -> None:
        """Merge another one of the same kind, over other clients."""
        ...

    def result(self) -> Tensor: ...


class Sums:
    """Σ n_k·x_k for every name of the clients' contributions, divided by Σ n_k and cast once: the order of clients does not matter.

    Values are added in float64. Indicators are counted in integers, which is exact: their mean is the weighted share of
    clients where they are true, that of a selection the share that named a link (or, with values, the weighted mean in which
    clients that did not name it count as 0).
    """

    def __init__(self, weights: Reduction | None = None, trim: float = 0.0) -> None:
        self._totals: dict[str, _Total] = {}
        self._clients = self._samples = 0
        self._weights = weights
        """What takes the place of the mean of `weights`."""
        self._trim = trim
        """Share of the clients' weight that is cut off at each end of every indicator and vote."""

    def add(self, contribution: Message, samples: int, weight: int | None = None) -> None:
        """Add one client's contribution with its number of samples, or with a smaller `weight`."""
        alone = {name: changed(payload, lambda tensor: tensor[None]) for name, payload in contribution.items()}
        self.add_together(alone, [samples], [samples if weight is None else weight])

    def add_together(self, contribution: Message, samples: Sequence[int], weights: Sequence[int]) -> None:
        """Add the contributions of several clients, which are the leading axis of its tensors: as if one came after the other."""
        self._clients += len(samples)
        self._samples += sum(samples)
        for name, payload in contribution.items():
            tensor = payload.indices if isinstance(payload, Selection) else carried(payload, Tensor)
            if tensor.shape[:1] != (len(samples),):
                raise InputError(
                    f"the contribution '{name}' has the shape {tuple(tensor.shape)} where {len(samples)} clients are the leading axis: "
                    "`contribution` has to work along the last one (docs/contract.md), or use --engine serial"
                )
            if name == "weights" and self._weights is not None:
                for row, weight in zip(tensor, weights, strict=True):
                    self._weights.add(row, weight)
            elif isinstance(payload, Selection):
                values = tensor.new_ones(1, dtype=torch.bool).expand(tensor.shape) if payload.values is None else payload.values
                total = self._total(name, (payload.size,), values, sum(weights))
                _accumulate_some(total.sum, tensor, values, weights)
            else:
                total = self._total(name, tuple(tensor.shape[1:]), tensor, sum(weights))
                _accumulate(total.sum, tensor, weights)

    def merge(self, other: Sums) -> None:
        """Merge the sums over other clients."""
        self._clients += other._clients
        self._samples += other._samples
        for name, theirs in other._totals.items():
            ours = self._totals.setdefault(name, _Total(torch.zeros_like(theirs.sum), theirs.dtype))
            ours.weigh(theirs.weight)
            ours.sum = ours.sum + theirs.sum
        if self._weights is not None and other._weights is not None:
            self._weights.merge(other._weights)

    def mean(self) -> Means:
        """Return weighted means by name, in the type of the contributions (shares in float32)."""
        means = {name: total.mean(self._trim) for name, total in self._totals.items()}
        if self._weights is not None:
            means["weights"] = self._weights.result()
        return Means(means, self._clients, self._samples)

    def _total(self, name: str, shape: tuple[int, ...], like: Tensor, weight: int) -> _Total:
        """Return the sum of this name, ready for another payload `like` this one with a weight."""
        if name not in self._totals:
            counted = like.dtype == torch.bool
            empty = fresh.zeros(shape, like, torch.int32 if counted else torch.float64)
            self._totals[name] = _Total(empty, torch.float32 if counted else like.dtype)
        self._totals[name].weigh(weight)
        return self._totals[name]


class RingSums:
    """The sum of the words of clients with at most `most_samples` samples each."""

    def __init__(self, form: SumForm, order: Order, most_samples: int) -> None:
        self.form, self.order, self.most_samples = form, order, most_samples
        self._total: Words = np.zeros(form.ring.words, np.uint32)
        self._clients = self._samples = 0

    def add(self, words: Words, clients: int, samples: int) -> None:
        """Add the summed words of this many clients with this many samples in total."""
        np.add(self._total, words, out=self._total)
        self._clients += clients
        self._samples += samples

    def merge(self, other: RingSums) -> None:
        """Merge the sums over other clients."""
        self.add(other._total, other._clients, other._samples)

    def mean(self) -> Means:
        """Return the means that a method's update takes."""
        return self.form.means(self._total, self.order, self._clients, self._samples, self.most_samples)


def _accumulate(sum: Tensor, rows: Tensor, weights: Sequence[int]) -> None:
    """sum += Σ weights[k] · rows[k], in the type of the sum.

    On a CPU row by row, so that a sum has the same bits however its clients came together, and piece by piece: what is converted stays
    in the cache. Elsewhere several are a product with their weights in float64, which counts exactly too.
    """
    in_turn = sum.device.type in _IN_TURN or len(rows) == 1
    many = _PIECE if sum.device.type == "cpu" else max(_CONVERTED // len(rows), 1)
    for total, part in zip(sum.view(-1).split(many), rows.reshape(len(rows), -1).split(many, dim=1), strict=True):
        if in_turn:
            for row, weight in zip(part, weights, strict=True):
                total.add_(row.to(total.dtype), alpha=weight)
        else:
            total.add_((_on(sum, weights, torch.float64) @ part.double()).to(total.dtype))


def _accumulate_some(sum: Tensor, indices: Tensor, values: Tensor, weights: Sequence[int]) -> None:
    """sum[indices[k]] += weights[k] · values[k], in the type of the sum, one client after the other."""
    in_turn = sum.device.type in _IN_TURN or len(indices) == 1
    if not in_turn and sum.is_floating_point():  # what several add to one place is added in any order there
        _accumulate(sum, values.new_zeros(len(indices), len(sum)).scatter_(1, indices, values), weights)
        return
    sum.index_add_(0, indices.flatten(), (values.to(sum.dtype) * _on(sum, weights, sum.dtype)[:, None]).flatten())


def _on(sum: Tensor, weights: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the weights on the device of a sum, without waiting for it."""
    return torch.tensor(weights, dtype=dtype).to(sum.device, non_blocking=True)


@dataclass
class _Total:
    sum: Tensor
    dtype: torch.dtype
    weight: int = 0

    def mean(self, trim: float) -> Tensor:
        """Return the mean; of counts, without the `trim` share at each end, which turns a share s into (s − t) / (1 − 2t)."""
        mean = fresh.copy(self.sum, torch.float64 if self.sum.is_floating_point() else torch.float32).div_(self.weight)
        if trim and not self.sum.is_floating_point():
            mean = ((mean - trim) / (1 - 2 * trim)).clamp_(0, 1)
        return mean.to(self.dtype)

    def weigh(self, more: int) -> None:
        """Prepare for adding so much weight; counts that might overflow move to a wider type."""
        self.weight += more
        if self.sum.dtype == torch.int32 and self.weight > torch.iinfo(torch.int32).max:
            self.sum = self.sum.long()
