"""SynFlow (Tanaka et al., 2020): prune at initialisation without any data, so that no layer is ever cut through.

On the server, before round 0: with every parameter replaced by its magnitude and an input of ones, R is the sum of the outputs and
w·∂R/∂w ≥ 0 the flow through a link. In n rounds of pruning the links of largest flow stay, d^(k/n) of them after the k-th, all layers
ranked together; flows are computed anew on what is left. In float64 and evaluation mode, where fresh BatchNorm is the identity. The
mask never changes.

Design decisions: biases and running means count as 0, since flow that begins in the middle of the network feeds the last layers where the
first are cut through. Inferred: embeddings (which read no ones) are not scored and get the budget of the experiment at random, their
output is ones; LayerNorm and its kin keep their scale but do not normalise, because a constant input would vanish.
"""

from __future__ import annotations

import copy
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedrts import trees
from fedrts.errors import InputError, reason
from fedrts.methods import register
from fedrts.methods.base import Sparse
from fedrts.methods.contract import Setup
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import top_arms_of_all


@register("synflow")
class SynFlow(Sparse):
    """A mask chosen once, without data, by the flow of magnitudes through each link."""

    topology: ClassVar[str] = "largest synaptic flow at the start, never changes"

    iterations: Annotated[int, Field(ge=1, description="n: rounds of pruning")] = 100

    def initial_mask(self, setup: Setup) -> Mask:
        layout, counts = setup.layout, setup.counts(self.density)
        module = copy.deepcopy(setup.module).double().eval().requires_grad_(True)
        embedded = embeddings(module, layout)
        drawn = super().initial_mask(setup).bits.split(list(layout.sizes))
        scored = torch.cat(
            [torch.full((size,), layer not in embedded, device=setup.weights.device) for layer, size in enumerate(layout.sizes)]
        )
        bits = torch.where(scored, torch.ones_like(scored), torch.cat(drawn))
        total, kept = int(scored.sum()), sum(count for layer, count in enumerate(counts) if layer not in embedded)
        flow_through(module)
        weights = without_shifts(setup.weights.double().abs(), layout)
        for k in range(1, self.iterations + 1 if total else 1):
            flow = flows(module, layout, torch.where(bits, weights[: layout.links], 0.0), weights[layout.links :], setup.input_shape)
            flow = flow.masked_fill(~(bits & scored), -torch.inf)
            stay = top_arms_of_all(flow, round(total * (kept / total) ** (k / self.iterations)), layout.sizes)
            bits = torch.where(scored, layout.sizes.spread(stay), bits)
        return Mask(bits, layout.sizes)


def flows(module: nn.Module, layout: Layout, links: Tensor, rest: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """Return w·∂R/∂w `[P]` of non-negative weights `links [P]`; `rest` is everything else of the vector."""
    vector = torch.cat([links, rest])
    gradient = torch.zeros_like(vector[: layout.parameters])
    layout.bind(module, vector, gradient)
    parameter = next(module.parameters())
    embedded = any(isinstance(part, nn.Embedding) for part in module.modules())
    ones = torch.ones((1, *input_shape), dtype=torch.long if embedded else parameter.dtype, device=parameter.device)
    try:
        output = trees.answer(module(ones))
    except TypeError as error:
        raise InputError(f"synflow sends ones through a model of one tensor, and this one takes others: {reason(error)}") from error
    output.sum().backward()
    return links * gradient[: layout.links]


def without_shifts(weights: Tensor, layout: Layout) -> Tensor:
    """Return `weights [n]` with 0 for additive parameters that are not links: all flow then comes from the input."""
    weights = weights.clone()
    for name, values in layout.views(weights[layout.links :], layout.dense + layout.buffers).items():
        if "bias" in (own := name.rpartition(".")[2]) or own == "running_mean":
            values.zero_()
    return weights


def embeddings(module: nn.Module, layout: Layout) -> set[int]:
    """Return the layers that are an embedding's weight, tied or not."""
    owned = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    return {index for index, entry in enumerate(layout.layers) if owned & set(entry.names)}


def flow_through(module: nn.Module) -> None:
    """Make embeddings output ones, and normalisation over features pass its input on, scaled."""

    def ones(part: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return torch.ones_like(output)

    def scaled(part: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        signal: Tensor = inputs[0]
        scale: Tensor | None = getattr(part, "weight", None)
        if scale is None:
            return signal
        by_feature = isinstance(part, (nn.LayerNorm, nn.RMSNorm))
        return signal * (scale if by_feature else scale.view((-1,) + (1,) * (output.dim() - 2)))

    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.register_forward_hook(ones)
        elif isinstance(part, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)) or (
            isinstance(part, nn.modules.batchnorm._NormBase)
            and part.running_mean is None  # without statistics of its own it normalises too
        ):
            part.register_forward_hook(scaled)
