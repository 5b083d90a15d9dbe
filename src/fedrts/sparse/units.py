"""Units of a sparse model without input or output links, or whose links are all 0: they exist, but do nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrts.sparse import random
from fedrts.sparse.layout import Entry
from fedrts.sparse.mask import Mask


@dataclass(frozen=True)
class CutOff:
    """Units around a layer that its mask cuts off."""

    layer: str
    inputs: int
    """Units of the layer itself without any input."""
    outputs: int
    """Units of the layer before without any output into this one; 0 for the first layer, whose inputs are the data's."""


def cut_off(layers: Sequence[Entry], mask: Mask, before: Mask | None = None) -> list[CutOff]:
    """Return the layers around which `mask` cuts off units; with a mask `before`, only units that it connected."""
    earlier = list(_connected(layers, before)) if before is not None else [None] * len(layers)
    found = []
    for entry, now, past in zip(layers, _connected(layers, mask), earlier, strict=True):
        counts = [int((~has if past is None else had & ~has).count_nonzero()) for has, had in zip(now, past or now, strict=True)]
        if any(counts):
            found.append(CutOff(entry.name, *counts))
    return found


def connected(layers: Sequence[Entry], mask: Mask) -> Tensor:
    """Return which units have links: bool `[U]`, for every layer its own units, then its inputs."""
    none = mask.bits[:0]  # a dense method's model may have no layers
    return torch.cat([none, *(has for pair in _connected(layers, mask) for has in pair)])


def number(layers: Sequence[Entry]) -> int:
    """U: how many units `connected` counts."""
    return sum(outputs + inputs for outputs, inputs in map(_around, range(len(layers)), layers))


def ends(layers: Sequence[Entry], mask: Mask) -> Tensor:
    """Return the two units that each active link joins, by their places in `connected`: `[2, A]`."""
    own, before, links, units = [], [], 0, 0
    for index, (entry, active) in enumerate(zip(layers, mask.active.split(list(mask.counts)), strict=True)):
        outputs, inputs = _around(index, entry)
        place = active - links
        own.append(units + place // (entry.size // outputs))
        before.append(units + outputs + (place // math.prod(entry.shape[2:])) % inputs)
        links, units = links + entry.size, units + outputs + inputs
    return torch.stack([torch.cat(own), torch.cat(before)])


def start_key(seed: int, round_index: int) -> int:
    """The key of a round's new weights: the same at the server and all clients."""
    return random.key(seed, "units that start anew", round_index)


def start_anew(layers: Sequence[Entry], weights: Tensor, mask: Mask, key: int) -> None:
    """Give weights to active arms whose links are all 0, in place (`weights [n]`): as strong as the others of their layer in a unit that
    has nothing else, a tenth of that in others. The sign is drawn. Single links start at 0, as the papers have it.

    A new mask of groups often leaves a unit with nothing but new links, or with others whose inputs are dead. At 0 such a unit stays silent
    behind a ReLU; behind a norm, which divides by √ε then, its gradient is hundreds of times too large.
    """
    if not mask.sizes.grouped:
        return
    sizes = list(mask.sizes)
    links = weights[: len(mask.bits)]
    new = mask.bits & ~mask.sizes.touched(links != 0)
    for index, entry in enumerate(layers):
        fresh, active, values = (part.split(sizes)[index].view(entry.shape[0], -1) for part in (new, mask.bits, links))
        alone = ~(values != 0).any(1, keepdim=True)
        fresh = fresh | (active & alone)
        if not bool(fresh.any()):
            continue
        others = values[values != 0]
        variance = others.square().mean() if len(others) else len(values) / (3 * active.count_nonzero())  # else that of PyTorch's first
        drawn = (random.uniform(random.key(key, index), entry.size, weights.device) - 0.5).sign().to(weights.dtype).view_as(values)
        values[fresh] = (drawn * variance.sqrt() * torch.where(alone, 1.0, _SHARE))[fresh]


_SHARE = 0.1
"""Magnitude at which a new arm starts beside active ones, as a share of that of the layer's weights."""


def _around(index: int, entry: Entry) -> tuple[int, int]:
    """Return how many units a layer has, and how many precede it; the first layer's inputs, which are data, count as one."""
    return entry.shape[0], entry.shape[1] if index and len(entry.shape) > 1 else 1


def _connected(layers: Sequence[Entry], mask: Mask) -> Iterator[tuple[Tensor, Tensor]]:
    """Return for every layer `[outputs, inputs, …]` which of its units have an input, and which of those before have an output."""
    for index, (entry, bits) in enumerate(zip(layers, mask.bits.split(list(mask.sizes)), strict=True)):
        links = bits.view(*entry.shape[:2], -1).any(-1) if len(entry.shape) > 1 else bits.view(-1, 1)
        yield links.any(1), links.any(0) if index else links.new_ones(1)
