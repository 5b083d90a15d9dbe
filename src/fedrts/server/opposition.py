"""Which clients cut off units, found unit by unit as replies come in, without keeping anything model-sized per client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from fedrts.client.order import Order
from fedrts.sparse.units import ends, number
from fedrts.wire.fields import Message, OwnValues, carried

_MOST = 0.5
"""A client that keeps less than this share of a unit's links does not keep the unit."""
_LOUD = 2.0
"""A client cancels a unit if its weights there are this multiple of the clients' median, and its part this multiple of the mean."""
_NOISE = 0.01
"""A client is not blamed where its weights are below this share of those of its largest unit: such units hardly do anything any more."""
_WATCHED = 1 << 16
"""Links that are looked at in each reply: all of a small model, evenly chosen ones of a large one."""


class Hearing:
    """What the clients of one order say about its units `[U]`, as `sparse.units.connected` counts them."""

    def __init__(self, order: Order) -> None:
        self.order, self.mask = order, order.frame.mask

    @cached_property
    def _watched(self) -> Tensor:
        """Return the watched places among the active links."""
        links = self.mask.number
        return torch.arange(0, links, -(-links // _WATCHED) or 1, device=self.mask.bits.device)

    @cached_property
    def _ends(self) -> Tensor:
        return ends(self.order.frame.layout.layers, self.mask)[:, self._watched]

    def of(self, opened: Message, contribution: Message) -> Tensor | None:
        """One client's word `[2, U]`: which share of a unit's active links it keeps, and the norm of its weights there.

        It says what it keeps by indicators or by a mask of its own; else it keeps everything. None where no weights are exchanged.
        Messages of several clients give `[clients, 2, U]`.
        """
        weights = opened.get("weights")
        if weights is None:
            return None
        if isinstance(weights, OwnValues):
            kept = weights.mask.bits[self.mask.active]
            values = weights.mask.expand(carried(weights.values, Tensor))[self.mask.active]
        else:
            values = carried(weights, Tensor)[..., : self.mask.number]
            kept = torch.ones_like(values, dtype=torch.bool)
        for told in contribution.values():
            if isinstance(told, Tensor) and told.dtype == torch.bool and told.shape == (*values.shape[:-1], self.mask.arms.number):
                kept = kept & self.mask.sizes.spread(self.mask.arms.expand(told)).index_select(-1, self.mask.active)
        share = self._added(kept.index_select(-1, self._watched).double()) / self._links
        return torch.stack([share.float(), self.norms(values)], dim=-2)

    def norms(self, values: Tensor) -> Tensor:
        """Return the norm of the active links' `values [..., A + …]` at each unit."""
        return self._added(values.index_select(-1, self._watched).double().square()).sqrt().float()

    @cached_property
    def _links(self) -> Tensor:
        """Return the number of watched links at each unit, at least 1."""
        return self._added(torch.ones_like(self._watched)).clamp(min=1)

    def _added(self, numbers: Tensor) -> Tensor:
        """Return the sum of the watched links' numbers `[..., W]` at each unit `[..., U]`."""
        units, clients = number(self.order.frame.layout.layers), numbers.shape[:-1]
        own = units * torch.arange(math.prod(clients), device=numbers.device)[:, None]  # of each client its own units
        sums = numbers.new_zeros(len(own) * units, dtype=torch.float64)
        sums.index_add_(0, (own + self._ends.flatten()).flatten(), torch.cat([numbers, numbers], dim=-1).double().flatten())
        return sums.view(*clients, units)


def cancelling(words: Mapping[int, Tensor], shares: Mapping[int, float], mean: Tensor) -> dict[int, Tensor]:
    """The units bool `[U]` that each client cancels, without clients that cancel none.

    There its weights are far larger than the others', and hardly anything is left of them in the mean. `words`: what clients said,
    `shares`: p_k of each, `mean [U]`: the norm of the mean weights.
    """
    if not words:
        return {}
    norms = torch.stack([word[1] for word in words.values()])
    part = norms * torch.tensor([shares[client] for client in words], device=norms.device)[:, None]
    loud = norms > torch.maximum(_LOUD * norms.quantile(0.5, dim=0), _NOISE * norms.amax(1, keepdim=True))
    found = loud & (part > _LOUD * mean)
    return {client: units for client, units, any in zip(words, found, found.any(1).tolist(), strict=True) if any}


def agreed(words: Mapping[int, Tensor], mean: Tensor) -> Tensor:
    """Return the units, bool `[U]`, whose weights mostly survive in the mean."""
    return mean * _LOUD > torch.stack([word[1] for word in words.values()]).quantile(0.5, dim=0)


def not_keeping(words: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the units, bool `[U]`, of which each client does not keep most links."""
    return {client: word[0] < _MOST for client, word in words.items()}


def ranked(found: Mapping[int, Tensor], among: Tensor) -> dict[int, int]:
    """Return the clients with `found` units `among` some, bool `[U]`, with the number of units, most units first."""
    together = torch.stack([*found.values(), among])[:-1] & among
    counts = dict(zip(found, together.count_nonzero(1).tolist(), strict=True))
    return {client: count for client, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])) if count}
