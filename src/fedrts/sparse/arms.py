"""Arms: what a method scores, chooses and names. An arm is a single link, or a group of links that are active together.

The unit of an experiment says which: `link`, `kernel` (all positions of one pair of channels), or `block:R×C` (R output by C input
channels or features, with all their positions). Masks stay boolean over links, and are constant in an arm. Whoever has the sizes of
layers at hand has the arms too: `Layers` are those sizes, and know how links come together.

    sizes = layout.sizes              # Layers: (144, 2304, …) links, in arms of (9, 144, …)
    scores = sizes.scored(gradient)   # [P] → [U], one number an arm
    bits = sizes.spread(chosen)       # [U] → [P]
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fedrts.errors import InputError

LINK, KERNEL = "link", "kernel"
_BLOCK = re.compile(r"block:(\d{1,6})[x×](\d{1,6})")
ArmBlock = tuple[int, int]
"""Output and input channels of an arm, all positions of which belong to it."""


def known_unit(unit: str) -> str:
    """Return the unit in its canonical spelling."""
    if unit in (LINK, KERNEL):
        return unit
    found = _BLOCK.fullmatch(unit)
    if found is None or not all(int(side) for side in found.groups()):
        raise InputError(f"topology.unit must be link, kernel, or block:R×C with R and C ≥ 1, such as block:4×4 (got {unit!r})")
    return "block:{}×{}".format(*(int(side) for side in found.groups()))


def asked_block(unit: str) -> ArmBlock | None:
    """Return the channels of an arm as the unit states them; None: links are arms."""
    if unit == LINK:
        return None
    found = _BLOCK.fullmatch(unit)
    return (int(found[1]), int(found[2])) if found else (1, 1)


def block_of(unit: str, shape: Sequence[int]) -> ArmBlock | None:
    """Return the channels of an arm in a layer of this shape: the largest block that divides both; None: links are arms."""
    asked = asked_block(unit)
    if asked is None or len(shape) < 2:
        return None
    block = math.gcd(shape[0], asked[0]), math.gcd(shape[1], asked[1])
    return block if math.prod(block) * math.prod(shape[2:]) > 1 else None


def smaller(unit: str, shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Say which layers have smaller arms than the unit asks for; None if there are none."""
    asked = asked_block(unit)
    if asked is None:
        return None
    found: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        block = block_of(unit, shape)
        if unit == KERNEL or block == asked:
            continue
        what = "links" if block is None else "kernels" if block == (1, 1) else f"blocks of {block[0]}×{block[1]}"
        found.setdefault(what, []).append(name)
    parts = (f"'{names[0]}'{f' and {len(names) - 1} more' if names[1:] else ''} in {what}" for what, names in found.items())
    return f"layers that it does not divide have arms of their own: {', '.join(parts)}" if found else None


def places(shape: Sequence[int], block: ArmBlock | None) -> Tensor:
    """Return the arm of every link of a layer, int64 `[n]`, counted row by row of the grid of blocks."""
    size = math.prod(shape)
    if block is None:
        return torch.arange(size)
    rows, columns = shape[0] // block[0], shape[1] // block[1]
    arms = torch.arange(rows * columns).view(rows, 1, columns, 1, 1)
    return arms.expand(rows, block[0], columns, block[1], math.prod(shape[2:])).reshape(-1)


class Layers(tuple[int, ...]):
    """How many links each layer has, layer after layer, and which of them are an arm together.

    `each[l]` links make an arm of layer l; `arm_of` int64 `[S]` names the arm of every link, counted over all layers. Without them, as in
    a plain tuple, every link is an arm of its own, and what goes from links to arms and back is what came in.
    """

    each: tuple[int, ...]
    arm_of: Tensor | None

    def __new__(cls, sizes: Sequence[int], each: Sequence[int] | None = None, arm_of: Tensor | None = None) -> Layers:
        made = super().__new__(cls, sizes)
        made.each = tuple(each) if each is not None and arm_of is not None else (1,) * len(made)
        made.arm_of = arm_of if max(made.each, default=1) > 1 else None
        return made

    def __reduce__(self) -> tuple[type[Layers], tuple[tuple[int, ...], tuple[int, ...], Tensor | None]]:
        """Pickle without cached values."""
        return Layers, (tuple(self), self.each, self.arm_of)

    @staticmethod
    def of(sizes: Sequence[int]) -> Layers:
        return sizes if isinstance(sizes, Layers) else Layers(sizes)

    @property
    def grouped(self) -> bool:
        """Whether any arm has more than one link."""
        return self.arm_of is not None

    @cached_property
    def arms(self) -> tuple[int, ...]:
        """U^l, the arms of each layer."""
        return tuple(size // each for size, each in zip(self, self.each, strict=True))

    @cached_property
    def links_of_arms(self) -> Tensor:
        """The number of links of each arm, int64 `[U]`."""
        return torch.tensor(self.each, dtype=torch.int64).repeat_interleave(torch.tensor(self.arms, dtype=torch.int64))

    def in_arms(self, links: Sequence[int]) -> tuple[int, ...]:
        """Return how many whole arms of each layer have at most this many `links[l]`."""
        return tuple(count // each for count, each in zip(links, self.each, strict=True))

    def in_links(self, arms: Sequence[int]) -> tuple[int, ...]:
        """Return how many links this many `arms[l]` of each layer have."""
        return tuple(count * each for count, each in zip(arms, self.each, strict=True))

    def whole(self, links: Sequence[int]) -> tuple[int, ...]:
        """Round `links[l]` down to whole arms."""
        return self.in_links(self.in_arms(links))

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the links of every arm: `[..., S]` → `[..., U]`, in float64 if arms have several."""
        if not self.grouped:
            return values
        parts, begin = [], 0
        ordered = values if self._together else values[..., self._order.to(values.device)]
        for size, each in zip(self, self.each, strict=True):
            part = ordered[..., begin : begin + size].unflatten(-1, (size // each, each))
            parts.append(part.mean(-1, dtype=torch.float64))
            begin += size
        return torch.cat(parts, dim=-1)

    def scored(self, scores: Tensor) -> Tensor:
        """Return the scores `[..., U]` of arms from their links' `scores [..., S]`, as a norm per link; scores of arms stay.

        The norm is that of the scores over √(links of the arm), so that arms of different sizes compare: ±√|mean(x·|x|)|, where scores
        below 0 count against those above.
        """
        if not self.grouped or scores.shape[-1] == sum(self.arms):
            return scores
        if scores.shape[-1] != sum(self):
            raise ValueError(f"{scores.shape[-1]} scores do not fit {sum(self)} links in {sum(self.arms)} arms")
        exact = scores.double()
        mean = self.mean(exact * exact.abs())
        found = mean.sign() * mean.abs().sqrt()
        return found.to(scores.dtype) if scores.is_floating_point() else found

    def spread(self, values: Tensor) -> Tensor:
        """Give every link the value of its arm: `[..., U]` → `[..., S]`; values of links stay."""
        if self.arm_of is None or values.shape[-1] == sum(self):
            return values
        return values[..., self.arm_of.to(values.device)]

    def picked(self, bits: Tensor) -> Tensor:
        """Return one entry per arm of `bits [..., S]` that are constant in every arm: `[..., U]`."""
        return bits[..., self._first.to(bits.device)] if self.grouped else bits

    def touched(self, bits: Tensor) -> Tensor:
        """Return `bits [S]` extended to all links of every arm with a set link."""
        if self.arm_of is None:
            return bits
        arms = torch.zeros(sum(self.arms), dtype=torch.bool, device=bits.device)
        arms[self.arm_of.to(bits.device)[bits]] = True
        return self.spread(arms)

    def among(self, bits: Tensor, counts: Sequence[int]) -> Layers:
        """Return the layers restricted to the links whose `bits [S]` are set, whole arms with `counts[l]` links in each layer."""
        if self.arm_of is None:
            return Layers(counts)
        rank = torch.cumsum(self.picked(bits), 0) - 1
        arm_of = self.arm_of.to(bits.device)[bits]
        return Layers(counts, self.each, rank[arm_of])

    @cached_property
    def _together(self) -> bool:
        """Whether the links of every arm are contiguous, arm after arm."""
        return self.arm_of is None or not bool((self.arm_of[1:] < self.arm_of[:-1]).any())

    @cached_property
    def _order(self) -> Tensor:
        """Return links in the order of their arms, int64 `[S]`."""
        assert self.arm_of is not None
        return self.arm_of.argsort(stable=True)

    @cached_property
    def _first(self) -> Tensor:
        """Return the first link of every arm, int64 `[U]`."""
        last = torch.cumsum(self.links_of_arms, 0).to(self._order.device)
        return self._order[last - self.links_of_arms.to(last.device)]
