"""A mask: which links are active, with the index arithmetic between the full vector and the values on the mask.

*Compact* values of a model are its active weights, layer after layer, followed by everything that is never pruned
(dense parameters and buffers): `[..., A + n - P]`. This is what travels, and what the server computes with, so that
its work follows the active links and not the model. Inside the active part layer l spans `counts[l]` = K^l entries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedrts.sparse import fresh
from fedrts.sparse.arms import Layers
from fedrts.sparse.layout import starts
from fedrts.sparse.topk import by_layer, top, top_arms, top_arms_of_all


class Mask:
    """An immutable boolean vector `bits [P]` over the prunable weights, divided into layers of `sizes`.

    Where links are grouped (`Layers`), it is constant in every arm, and `arms` is the same mask over the arms.
    """

    def __init__(self, bits: Tensor, sizes: Sequence[int]) -> None:
        if bits.dtype != torch.bool or bits.shape != (sum(sizes),):
            raise ValueError(f"a mask over layers of {list(sizes)} cannot be {bits.dtype} {tuple(bits.shape)}")
        self.bits = bits
        self.sizes = Layers.of(sizes)

    def __reduce__(self) -> tuple[type[Mask], tuple[Tensor, tuple[int, ...]]]:
        """Pickle without cached values."""
        return Mask, (self.bits, self.sizes)

    @staticmethod
    def of_arms(bits: Tensor, sizes: Sequence[int]) -> Mask:
        """Make the mask of the arms whose `bits [U]` are set."""
        return Mask(Layers.of(sizes).spread(bits), sizes)

    @staticmethod
    def full(sizes: Sequence[int], device: torch.device | str = "cpu") -> Mask:
        return Mask(torch.ones(sum(sizes), dtype=torch.bool, device=device), sizes)

    @staticmethod
    def top(scores: Tensor, counts: Sequence[int], sizes: Sequence[int]) -> Mask:
        """Make the mask of the `counts[l]` largest `scores [P]` of each layer; of arms `[U]` if links are grouped."""
        return Mask(top(scores, counts, sizes), sizes)

    @staticmethod
    def top_of_all(scores: Tensor, number: int, sizes: Sequence[int]) -> Mask:
        """Make the mask of the `number` largest `scores [P]` of all layers together; every layer keeps at least its best one."""
        layers = Layers.of(sizes)
        scores = layers.scored(scores)
        best = top_arms(scores, layers.each, layers)
        return Mask.of_arms(top_arms_of_all(scores.masked_fill(best, torch.inf), number, layers), layers)

    @staticmethod
    def unpacked(packed: np.ndarray, sizes: Sequence[int]) -> Mask:
        """Inverse of `packed`."""
        return Mask(torch.from_numpy(np.unpackbits(packed, count=sum(sizes)).astype(np.bool_)), sizes)

    def packed(self) -> np.ndarray:
        """Return one bit per link, uint8 `[⌈P / 8⌉]`."""
        return np.packbits(self.bits.cpu().numpy())

    @cached_property
    def arms(self) -> Mask:
        """The mask over arms: `bits [U]`, divided into layers; this mask itself if every link is an arm."""
        return Mask(self.sizes.picked(self.bits), self.sizes.arms) if self.sizes.grouped else self

    @cached_property
    def counts(self) -> Layers:
        """K^l: the active links of each layer, and their arms."""
        return self.sizes.among(self.bits, by_layer(self.bits, self.sizes))

    @cached_property
    def bounds(self) -> Tensor:
        """Where each layer begins, and the last one ends: `[layers + 1]`."""
        return torch.tensor(starts(self.sizes), device=self.bits.device)

    @property
    def free(self) -> tuple[int, ...]:
        """n^l − K^l: inactive links in each layer."""
        return tuple(size - active for size, active in zip(self.sizes, self.counts, strict=True))

    @cached_property
    def active(self) -> Tensor:
        """Ascending indices `[A]` of the active links."""
        return flat_indices(self.bits)

    @cached_property
    def inactive(self) -> Tensor:
        """Ascending indices `[P - A]` of the inactive links."""
        return flat_indices(~self.bits)

    @cached_property
    def places(self) -> Tensor:
        """For each inactive link, its place in `inactive`: int32 `[P]`."""
        return torch.cumsum(~self.bits, 0, dtype=torch.int32).sub_(1)

    @cached_property
    def number(self) -> int:
        """A: the number of active links."""
        return sum(self.counts)

    @cached_property
    def fingerprint(self) -> bytes:
        """A fingerprint of 8 bytes."""
        return hashlib.blake2b(self.packed().tobytes(), digest_size=8).digest()

    @property
    def is_full(self) -> bool:
        return self.number == len(self.bits)

    def compact(self, vector: Tensor) -> Tensor:
        """Return values on the mask and the unpruned rest: `[..., n]` → `[..., A + n - P]`."""
        if self.is_full:
            return vector.clone()
        return torch.cat([vector.index_select(-1, self.active), vector[..., len(self.bits) :]], dim=-1)

    def expand(self, compact: Tensor) -> Tensor:
        """The full vector with exact zeros outside the mask: inverse of `compact`."""
        if self.is_full:
            return compact.clone()
        rest = compact.shape[-1] - self.number
        vector = fresh.zeros((*compact.shape[:-1], len(self.bits) + rest), compact)
        vector[..., self.active] = compact[..., : self.number]
        vector[..., len(self.bits) :] = compact[..., self.number :]
        return vector

    def gained(self, before: Mask) -> int:
        """Return links that are active here and were not in `before`."""
        return 0 if self is before else int((self.bits & ~before.bits).count_nonzero())

    def to(self, device: torch.device | str) -> Mask:
        return Mask(self.bits.to(device), self.sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.sizes == other.sizes and torch.equal(self.bits, other.bits)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Mask({self.number} of {len(self.bits)} links in {len(self.sizes)} layers)"


def flat_indices(bits: Tensor) -> Tensor:
    """Return ascending indices of the set ones among `bits [n]`."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(bits.numpy()))
    return bits.nonzero().squeeze(-1)
