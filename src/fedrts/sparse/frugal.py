"""Modules that train with less memory: sparse or one-bit activations, and convolutions without BatchNorm (FedMef)."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Net = TypeVar("Net", bound=nn.Module)

_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def pack(flags: Tensor) -> Tensor:
    """bool `[m]` → uint8 `[⌈m/8⌉]`."""
    padded = F.pad(flags.to(torch.uint8), (0, -len(flags) % 8)).view(-1, 8)
    return (padded * _BITS.to(flags.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of uint8 `packed`, as bool."""
    return (packed[:, None] & _BITS.to(packed.device)).ne(0).flatten()[:count]


class _BitReLU(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu(), pack((x > 0).flatten())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        (packed,) = ctx.saved_tensors
        return gradient * unpack(packed, gradient.numel()).view(gradient.shape)


class BitReLU(nn.Module):
    """ReLU that keeps one bit per element for its backward pass instead of its output."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _BitReLU.apply(x)[0]  # type: ignore[no-untyped-call]
        return output


def largest(x: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return values and int32 positions of the ⌈share·m⌉ largest magnitudes of `x [m elements]`."""
    flat = x.flatten()
    places = flat.abs().topk(math.ceil(share * len(flat)), sorted=False).indices
    return flat[places], places.to(torch.int32)


def scattered(values: Tensor, places: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return the tensor that is 0 except for `values` at `places`."""
    return values.new_zeros(math.prod(shape)).scatter(0, places.long(), values).view(shape)


class _SparselySaved(torch.autograd.Function):
    """A convolution or linear map with exact output and input gradient; its weight gradient uses a pruned input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, share: float, settings: tuple[Any, ...] | None) -> tuple[Tensor, Tensor, Tensor]:
        values, places = largest(x, share)
        output = F.linear(x, weight) if settings is None else F.conv2d(x, weight, None, *settings)
        return output, values, places

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.settings = inputs
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.shape = x.shape
        ctx.save_for_backward(weight, output[1], output[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        weight, values, places = ctx.saved_tensors
        x = scattered(values, places, ctx.shape)
        if ctx.settings is None:
            return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2), None, None
        stride, padding, dilation, groups = ctx.settings
        to_input, to_weight, _unused = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [True, True, False]
        )
        return to_input, to_weight, None, None


class SparseInputConv2d(nn.Conv2d):
    """A convolution that keeps the largest `share` of its input for the backward pass."""

    share: float

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        settings = (self.stride, self.padding, self.dilation, self.groups)
        output: Tensor = _SparselySaved.apply(x, weight, self.share, settings)[0]  # type: ignore[no-untyped-call]
        return output if bias is None else output + bias.view(-1, 1, 1)


class SparseInputLinear(nn.Linear):
    """A linear layer that keeps the largest `share` of its input for the backward pass."""

    share: float

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _SparselySaved.apply(x, self.weight, self.share, None)[0]  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias


class StandardisedConv2d(nn.Conv2d):
    """A convolution of W' = gain · (W − mean) / √max(var·fan_in, 1e-4) per output channel, and 0 where W is 0.

    Mean and variance are over all entries, zeros included. A link at 0 has no part in the convolution, but its gradient is that of the link
    if it had: so inactive links can be judged, and new ones leave 0.
    """

    gain: nn.Parameter

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = super()._conv_forward(x, self.standardised(weight), bias)
        return output

    def standardised(self, weight: Tensor) -> Tensor:
        """`[out, in/groups, h, w]` → the same shape."""
        rows = weight.flatten(1)
        mean, variance = rows.mean(1), rows.var(1, unbiased=False)
        scale = self.gain * torch.rsqrt(torch.clamp(variance * rows.shape[1], min=1e-4))
        column = (-1, 1, 1, 1)
        whole = (weight - mean.view(column)) * scale.view(column)
        absent = (weight - weight.detach()) * scale.detach().view(column)  # 0, with the gradient that the link would have
        return torch.where(weight != 0, whole, absent)


class _StandardisedSparseInputConv2d(StandardisedConv2d, SparseInputConv2d):
    """Combine both: `StandardisedConv2d._conv_forward` passes the standardised weight to `SparseInputConv2d`'s."""


def save_activations_sparsely(module: Net, share: float, linear: bool = False) -> Net:
    """Convert `module`: ReLUs keep bits, and convolutions (and linear layers) keep the largest `share` of their inputs."""
    kinds: dict[type[nn.Module], type[nn.Module]] = {
        nn.Conv2d: SparseInputConv2d,
        StandardisedConv2d: _StandardisedSparseInputConv2d,
        **({nn.Linear: SparseInputLinear} if linear else {}),
    }
    for part in list(module.modules()):
        for name, child in _children(part):
            if type(child) is nn.ReLU:
                setattr(part, name, BitReLU())
            elif type(child) in kinds and _pads_with_zeros(child):
                child.__class__ = kinds[type(child)]
                child.share = share  # type: ignore[assignment]
    return module


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Yield parts by name, including second names of shared ones, which `named_children` leaves out."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _pads_with_zeros(module: nn.Module) -> bool:
    """Whether it pads with zeros by number, or not at all (a linear layer)."""
    return getattr(module, "padding_mode", "zeros") == "zeros" and not isinstance(getattr(module, "padding", 0), str)


def standardise_convolutions(module: Net) -> Net:
    """Convert `module` to weight-standardised convolutions (gain 1, with bias) without BatchNorm."""
    for part in list(module.modules()):
        for name, child in _children(part):
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(part, name, nn.Identity())
            elif type(child) is nn.Conv2d:
                child.__class__ = StandardisedConv2d
                child.gain = nn.Parameter(child.weight.new_ones(child.out_channels))
                if child.bias is None:
                    child.bias = nn.Parameter(child.weight.new_zeros(child.out_channels))
    return module
