"""The cost of a model: multiply-accumulates (MAC) of a forward pass, and the bytes of a sparse model by the accountings on paper.

Counted are matrix products, convolutions and attention, wherever a model computes them, from the shapes that they really have. Not
counted: additions, normalisation, activations, look-ups in an embedding, the loss. As in the paper one MAC counts as one FLOP and a
backward pass as two forward passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedrts import trees
from fedrts.sparse.dispatch import Watching
from fedrts.sparse.layout import Entry, Layout, Shape
from fedrts.sparse.mask import Mask
from fedrts.sparse.mode import training

VALUE_BYTES = 4
"""Bytes of a value in the accountings on paper."""

Length = Callable[[Shape, float, int], float]
"""(shape of a tensor, its active entries, bits of a value) → bits of the sparse tensor."""


def bitmap(shape: Shape, active: float, bits: int) -> float:
    """Return n + m·b: one bit per entry marks where the values are; n·b if none is missing."""
    size = math.prod(shape)
    return size * bits if active >= size else size + active * bits


def by_density(shape: Shape, active: float, bits: int) -> float:
    """The paper's rules for n entries of which m are active, d = m/n: dense, bitmap, coordinates, or compressed rows or columns.

    d ≥ 0.9: n·b; d ≥ 0.3: n + m·b; d ≥ 0.1: m·⌈log2 n⌉ + m·b; else, for r rows of c entries, m·⌈log2 c⌉ + r·⌈log2 m⌉ + m·b, or the
    same of the columns where that is less. Tensors of more axes have a row for each index of the first.
    """
    size = math.prod(shape)
    density = active / size
    if density >= 0.9:
        return size * bits
    if density >= 0.3:
        return bitmap(shape, active, bits)
    if density >= 0.1:
        return active * (_bits_for(size) + bits)
    rows, columns = shape[0], size // shape[0]
    return min(active * _bits_for(c) + r * _bits_for(active) for r, c in ((rows, columns), (columns, rows))) + active * bits


def _bits_for(count: float) -> int:
    """Return ⌈log2 count⌉."""
    return math.ceil(math.log2(max(count, 1)))


@dataclass(frozen=True)
class Book:
    """An accounting on paper: the bytes of a model of some density at some time of the schedule."""

    layout: Layout
    active: tuple[float, ...]
    """Links that each layer keeps; not whole where a density is taken at its word."""
    length: Length
    fraction: float
    """ζ_t = f(t): the share of the links that outer rounds exchange."""

    @staticmethod
    def paper(layout: Layout, density: float, fraction: float) -> Book:
        """The accounting of the published tables: the same density everywhere, and a bitmap at every density."""
        counted = as_published(layout)
        return Book(counted, tuple(density * size for size in counted.sizes), bitmap, fraction)

    @staticmethod
    def rules(layout: Layout, counts: Sequence[int], fraction: float) -> Book:
        """The accounting of the paper's text: each layer coded by its own density, of `counts` = K^l links."""
        return Book(layout, tuple(counts), by_density, fraction)

    @property
    def statistics(self) -> int:
        """Buffers, which are never pruned or shortened."""
        return self.layout.length - self.layout.parameters

    @property
    def dense(self) -> float:
        """O_d: bytes of the whole model."""
        return VALUE_BYTES * self.layout.length

    def sparse(self, bits: int = 8 * VALUE_BYTES) -> float:
        """O_s: bytes of the model on its mask, with this many bits per value."""
        links = sum(self.length(entry.shape, active, bits) for entry, active in zip(self.layout.layers, self.active, strict=True))
        return (links + bits * (self.layout.parameters - self.layout.links)) / 8 + VALUE_BYTES * self.statistics


def as_published(layout: Layout) -> Layout:
    """The layout that the published tables count.

    The paper's table of a language model, whose output matrix is tied to the embedding, counts that matrix twice, no bias, and everything
    else as prunable. Models without tied tensors are counted as they are.
    """
    if all(len(entry.names) == 1 for entry in layout.parameter_entries):
        return layout
    counted = (entry for entry in layout.parameter_entries if not entry.name.endswith("bias"))
    return Layout(tuple(Entry((name,), entry.shape) for entry in counted for name in entry.names), (), layout.buffers)


@dataclass(frozen=True)
class Macs:
    """MACs per sample of a forward pass."""

    layers: tuple[float, ...]
    """MACs of the products with each prunable tensor, which shrink with the layer's density."""
    rest: float
    """MACs of all other products: with what is never pruned (the output layer), and of activations with each other (attention)."""

    @staticmethod
    def of(module: nn.Module, layout: Layout, sample: trees.Tensors) -> Macs:
        """Count in one forward pass over `sample` (a batch of inputs)."""
        named = dict(module.named_parameters(remove_duplicate=False))
        counter = _Counter([named[entry.name] for entry in layout.layers], [*module.parameters(), *module.buffers()])
        with training(module, False), torch.no_grad(), _in_single_products(), counter:
            trees.called(module, sample)
        samples = trees.count(sample)
        return Macs(tuple(macs / samples for macs in counter.layers), counter.rest / samples)

    @property
    def dense(self) -> float:
        return sum(self.layers) + self.rest

    def forward(self, mask: Mask) -> float:
        """Return MACs per sample if every layer costs its density's share."""
        return self.at(mask.counts, mask.sizes)

    def at(self, counts: Sequence[int], sizes: Sequence[int]) -> float:
        """Return the same for layers that keep `counts` of their `sizes` links."""
        return self.rest + sum(macs * active / size for macs, active, size in zip(self.layers, counts, sizes, strict=True))


class _Counter(Watching):
    """Count every operation, and track tensors made of weights alone (views, masked or standardised weights)."""

    def __init__(self, prunable: Sequence[Tensor], constants: Sequence[Tensor]) -> None:
        super().__init__()
        self.layers = [0.0] * len(prunable)
        self.rest = 0.0
        self.made_of: dict[int, frozenset[int]] = {id(tensor): frozenset() for tensor in constants}
        self.made_of |= {id(tensor): frozenset([layer]) for layer, tensor in enumerate(prunable)}
        self.kept: list[Tensor] = []  # an id says nothing once its tensor is gone

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = _COUNTED.get(func._overloadpacket.__name__)
        if count is not None:
            self._add(*count(args, result))
        sources = [self.made_of.get(id(leaf)) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            if None in sources:
                self.made_of.pop(id(leaf), None)
            else:
                self.made_of[id(leaf)] = frozenset().union(*(source for source in sources if source is not None))
                self.kept.append(leaf)
        return result

    def _add(self, macs: float, factors: Sequence[Tensor]) -> None:
        """Assign a product of two factors to a layer if one factor was made of that layer alone and the other of none."""
        layers = [layer for factor in factors for layer in self.made_of.get(id(factor), ())]
        if len(layers) == 1 and len(factors) == 2:
            self.layers[layers[0]] += macs
        else:
            self.rest += macs


FlopCount = Callable[[tuple[Any, ...], Any], tuple[float, Sequence[Tensor]]]
"""(arguments, result) of an operation → its MACs and the factors of the product."""


def _product(a: Tensor, b: Tensor) -> tuple[float, Sequence[Tensor]]:
    return a.numel() * (b.shape[-1] if b.dim() > 1 else 1), (a, b)


def _convolution(args: tuple[Any, ...], result: Tensor) -> tuple[float, Sequence[Tensor]]:
    x, weight, transposed = args[0], args[1], args[6]
    positions = x if transposed else result  # each meets one row of the weight
    return positions.numel() * weight.numel() / weight.shape[0], (x, weight)


def _attention(args: tuple[Any, ...], result: Any) -> tuple[float, Sequence[Tensor]]:
    q, k, v = args[:3]
    scores = q.numel() // q.shape[-1] * k.shape[-2]  # all of them, though a causal kernel may skip half
    return scores * (q.shape[-1] + v.shape[-1]), (q, k, v)


_COUNTED: dict[str, FlopCount] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), lambda args, result: _product(args[0], args[1])),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), lambda args, result: _product(args[1], args[2])),
    "convolution": _convolution,
    **dict.fromkeys(
        (
            f"_scaled_dot_product_{kind}"
            for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
        ),
        _attention,
    ),
}


@contextmanager
def _in_single_products() -> Iterator[None]:
    """Keep PyTorch from running a whole encoder layer or LSTM as one operation, which would hide its products."""
    libraries: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn)
    before = torch.backends.mha.get_fastpath_enabled(), [library.enabled for library in libraries]

    def allow(encoder: bool, enabled: Sequence[bool]) -> None:
        torch.backends.mha.set_fastpath_enabled(encoder)
        for library, wanted in zip(libraries, enabled, strict=True):
            library.enabled = wanted

    allow(False, [False, False])
    try:
        yield
    finally:
        allow(*before)
