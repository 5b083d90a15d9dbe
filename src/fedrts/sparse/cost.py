"""What a model costs: multiply-accumulates (MAC) of a forward pass, in all and as its layers' densities make it.

As in the paper one MAC counts as one FLOP and a backward pass as two forward passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask


@dataclass(frozen=True)
class Macs:
    """MACs per sample of a forward pass."""

    layers: tuple[float, ...]
    """Of the modules that own each prunable tensor: these shrink with the layer's density."""
    rest: float
    """Of everything else (output layer, attention products)."""

    @staticmethod
    def of(module: nn.Module, layout: Layout, sample: Tensor) -> Macs:
        """Counted in one forward pass over two copies of `sample` (a batch of one input)."""
        batch = torch.cat([sample[:1], sample[:1]])
        was_training = module.training
        module.eval()
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            module(batch)
        module.train(was_training)
        root = type(module).__name__
        by_module = {path.removeprefix(f"{root}.").removeprefix(root): sum(c.values()) for path, c in counter.get_flop_counts().items()}
        total = float(counter.get_total_flops())
        layers = [_flops_of(by_module, entry.names) for entry in layout.layers]
        scale = 2 * len(batch)  # two FLOPs of the counter are one MAC
        return Macs(tuple(flops / scale for flops in layers), (total - sum(layers)) / scale)

    @property
    def dense(self) -> float:
        return sum(self.layers) + self.rest

    def forward(self, mask: Mask) -> float:
        """MACs per sample where every layer costs its density's share."""
        return self.rest + sum(macs * active / size for macs, active, size in zip(self.layers, mask.counts, mask.sizes, strict=True))


def _flops_of(by_module: dict[str, int], names: tuple[str, ...]) -> float:
    """FLOPs of the modules that own a (possibly tied) parameter."""
    return float(sum(by_module.get(name.rpartition(".")[0], 0) for name in names))
