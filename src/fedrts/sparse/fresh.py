"""Fresh memory for long vectors.

On a CPU it is numpy's, which asks the kernel for huge pages; PyTorch's comes in pages of 4 KiB, and to have 45 MB of them made takes longer
than to fill them. Elsewhere, and for short vectors, it is PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_LONG = 1 << 22
"""Bytes from which on numpy asks for huge pages."""


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor with arbitrary contents, on the device of `like`, and by default of its type."""
    dtype = dtype or like.dtype
    size = math.prod(shape) * dtype.itemsize
    if like.device.type != "cpu" or size < _LONG:
        return torch.empty(shape, dtype=dtype, device=like.device)
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(shape)


def zeros(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros, on the device of `like`, and by default of its type."""
    return empty(shape, like, dtype).zero_()


def copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of the tensor, by default in its type."""
    return empty(tensor.shape, tensor, dtype).copy_(tensor)
