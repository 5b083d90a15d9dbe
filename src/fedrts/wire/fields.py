"""The fields of a message: declarations of what travels, from which everything else about traffic derives.

A method declares fields; it never touches bytes. A field can take its payload from a sender's tensors, put it into a
receiver's, and say how long it is. Payloads are tensors, or a `Selection` where only some links are named.

Lengths count values plus a bitmap of the positions of the tensors that are really sent, and ⌈log2 n⌉ bits per index,
until messages are encoded by a codec; then they become the codec's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import top_indices

VALUE_BYTES = 4
"""Values travel as float32."""


@dataclass(frozen=True)
class Selection:
    """Some of `size` links: ascending `indices [..., q]`, with their `values [..., q]` where those travel too."""

    indices: Tensor
    size: int
    values: Tensor | None = None


Payload = Any
"""A tensor, or a `Selection`."""
Message = dict[str, Payload]


class Field(Protocol):
    """What one entry of a message is."""

    def take(self, tensors: Mapping[str, Tensor], mask: Mask) -> Payload:
        """The payload, from a sender's tensors by name and its mask."""
        ...

    def put(self, payload: Payload, mask: Mask) -> Tensor:
        """The receiver's own tensor of a payload."""
        ...

    def length(self, payload: Payload, mask: Mask) -> int:
        """Bytes on the wire."""
        ...

    def paper_length(self, layout: Layout, density: float, fraction: float) -> float:
        """Bytes in the paper's accounting: uniform density, a bitmap for the positions, f(t) = `fraction`."""
        ...


@dataclass(frozen=True)
class Values:
    """Numbers of the tensor `of`: those on the mask with the unpruned rest, or all of them."""

    of: str = "weights"
    on: Literal["mask", "all"] = "mask"

    def take(self, tensors: Mapping[str, Tensor], mask: Mask) -> Tensor:
        return mask.compact(tensors[self.of]) if self.on == "mask" else tensors[self.of].clone()

    def put(self, payload: Payload, mask: Mask) -> Tensor:
        tensor: Tensor = mask.expand(payload) if self.on == "mask" else payload.clone()
        return tensor

    def length(self, payload: Payload, mask: Mask) -> int:
        positions = 0 if self.on == "all" or mask.is_full else math.ceil(len(mask.bits) / 8)
        return VALUE_BYTES * int(payload.shape[-1]) + positions

    def paper_length(self, layout: Layout, density: float, fraction: float) -> float:
        if self.on == "all" or density >= 1:
            return VALUE_BYTES * layout.length
        return VALUE_BYTES * density * layout.links + layout.links / 8 + VALUE_BYTES * (layout.length - layout.links)


@dataclass(frozen=True)
class Indices:
    """Names of links: the `k[l]` largest magnitudes of the tensor `of` in each layer among the inactive links."""

    of: str
    k: Sequence[int]

    def take(self, tensors: Mapping[str, Tensor], mask: Mask) -> Selection:
        return Selection(top_indices(tensors[self.of].abs(), self.k, ~mask.bits, mask.sizes), len(mask.bits))

    def put(self, payload: Payload, mask: Mask) -> Tensor:
        indices: Tensor = payload.indices
        return indices

    def length(self, payload: Payload, mask: Mask) -> int:
        bits = sum(k * math.ceil(math.log2(size)) for k, size in zip(self.k, mask.sizes, strict=True) if k)
        return math.ceil(bits / 8)

    def paper_length(self, layout: Layout, density: float, fraction: float) -> float:
        return 0.5 * fraction * Values().paper_length(layout, density, fraction)


def length(fields: Mapping[str, Field], message: Message, mask: Mask) -> int:
    """Bytes of a whole message."""
    return sum(field.length(message[name], mask) for name, field in fields.items())
