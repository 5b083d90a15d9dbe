"""Convolutions of many clients as products of matrices.

Under vmap a convolution whose filters differ from client to client becomes a grouped one, for which GPUs have slow kernels. Unfolded, it is
one batched product, which they do well; it takes the memory of every patch of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

MOST_NUMBERS = 2**23
"""Patches of more numbers than these stay with the grouped kernels: writing and reading them would take longer."""


class Unfolded(TorchFunctionMode):
    """Small plain convolutions of images are carried out unfolded while this is entered."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        chosen = unfolded_conv2d if func is torch.conv2d else func
        return chosen(*args, **(kwargs or {}))


def unfolded_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """`torch.conv2d` of `x [m, c, h, w]` and `weight [o, c, i, j]`, as a product where that is worth it."""
    if groups != 1 or isinstance(padding, str) or x.dim() != 4:
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    strides, paddings, dilations = _pair(stride), _pair(padding), _pair(dilation)
    kernel = (weight.shape[2], weight.shape[3])
    height, width = ((x.shape[2 + n] + 2 * paddings[n] - dilations[n] * (kernel[n] - 1) - 1) // strides[n] + 1 for n in (0, 1))
    if len(x) * weight[0].numel() * height * width > MOST_NUMBERS:
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    out = weight.flatten(1) @ F.unfold(x, kernel, dilations, paddings, strides)  # [o, c·i·j] · [m, c·i·j, h·w]
    image: Tensor = out.unflatten(2, (height, width))
    return image if bias is None else image + bias[:, None, None]


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1])  # torch's layers give one number or two
