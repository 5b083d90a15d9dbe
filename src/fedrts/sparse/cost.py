"""What a model costs: multiply-accumulates (MAC) of a forward pass, in all and as its layers' densities make it.

As in the paper one MAC counts as one FLOP and a backward pass as two forward passes. Products without weights (attention
scores) are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask


@dataclass(frozen=True)
class Macs:
    """MACs per sample of a forward pass."""

    layers: tuple[float, ...]
    """Of the modules that own each prunable tensor: these shrink with the layer's density."""
    rest: float
    """Of everything else that has weights (the output layer)."""

    @staticmethod
    def of(module: nn.Module, layout: Layout, sample: Tensor) -> Macs:
        """Counted in one forward pass over `sample` (a batch of inputs), by hooks on the linear and convolutional modules."""
        counted: dict[str, float] = {}

        def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            def count(part: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                transposed = isinstance(part, nn.modules.conv._ConvTransposeNd)
                positions = inputs[0] if transposed else output  # each meets one row of the weight
                weight: Tensor = part.weight  # type: ignore[assignment]
                counted[name] = counted.get(name, 0) + positions.numel() * weight.numel() / weight.shape[0] / len(sample)

            return count

        weighted = [(name, part) for name, part in module.named_modules() if isinstance(part, (nn.Linear, nn.modules.conv._ConvNd))]
        hooks = [part.register_forward_hook(watch(name)) for name, part in weighted]
        was_training = module.training
        try:
            with torch.no_grad():
                module.eval()(sample)
        finally:
            module.train(was_training)
            for hook in hooks:
                hook.remove()
        layers = [sum(counted.get(name.rpartition(".")[0], 0.0) for name in entry.names) for entry in layout.layers]
        return Macs(tuple(layers), sum(counted.values()) - sum(layers))

    @property
    def dense(self) -> float:
        return sum(self.layers) + self.rest

    def forward(self, mask: Mask) -> float:
        """MACs per sample where every layer costs its density's share."""
        return self.rest + sum(macs * active / size for macs, active, size in zip(self.layers, mask.counts, mask.sizes, strict=True))
