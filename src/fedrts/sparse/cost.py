"""What a model costs: multiply-accumulates (MAC) of a forward pass, in all and as its layers' densities make it.

Counted are matrix products, convolutions and attention, wherever a model computes them, from the shapes that they really have. Not
counted: additions, normalisation, activations, look-ups in an embedding, the loss. As in the paper one MAC counts as one FLOP and a
backward pass as two forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask


@dataclass(frozen=True)
class Macs:
    """MACs per sample of a forward pass."""

    layers: tuple[float, ...]
    """Of the products with each prunable tensor: these shrink with the layer's density."""
    rest: float
    """Of all other products: with what is never pruned (the output layer), and of activations with each other (attention)."""

    @staticmethod
    def of(module: nn.Module, layout: Layout, sample: Tensor) -> Macs:
        """Counted in one forward pass over `sample` (a batch of inputs)."""
        named = dict(module.named_parameters(remove_duplicate=False))
        counter = _Counter([named[entry.name] for entry in layout.layers], [*module.parameters(), *module.buffers()])
        was_training = module.training
        try:
            with torch.no_grad(), _in_single_products(), counter:
                module.eval()(sample)
        finally:
            module.train(was_training)
        return Macs(tuple(macs / len(sample) for macs in counter.layers), counter.rest / len(sample))

    @property
    def dense(self) -> float:
        return sum(self.layers) + self.rest

    def forward(self, mask: Mask) -> float:
        """MACs per sample where every layer costs its density's share."""
        return self.rest + sum(macs * active / size for macs, active, size in zip(self.layers, mask.counts, mask.sizes, strict=True))


class _Counter(TorchDispatchMode):
    """Watches every operation, and which tensors were made of weights alone (views, masked or standardised weights)."""

    def __init__(self, prunable: Sequence[Tensor], constants: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        """A product of two factors belongs to a layer if one was made of that layer alone and the other of none."""
        layers = [layer for factor in factors for layer in self.made_of.get(id(factor), ())]
        if len(layers) == 1 and len(factors) == 2:
            self.layers[layers[0]] += macs
        else:
            self.rest += macs


Count = Callable[[tuple[Any, ...], Any], tuple[float, Sequence[Tensor]]]
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


_COUNTED: dict[str, Count] = {
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
    """PyTorch may run a whole encoder layer or LSTM as one operation, which shows none of its products: not while we count."""
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
