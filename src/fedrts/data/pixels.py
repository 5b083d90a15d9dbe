"""Stored images (uint8) and model inputs: normalised, and augmented in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fedrts.errors import InputError, nearest

Augment = bool | str
"""True: what suits the data set; False: nothing; or some of `crop`, `flip` and `cutout`, as in `"crop+flip"`."""

STRENGTHS = {"crop": 4, "flip": 1, "cutout": 16}


@dataclass(frozen=True)
class Pixels:
    """The view of images `[m, c, h, w]`, uint8: (x/255 − mean) / std; in training also cropped, flipped and cut out."""

    scale: Tensor
    shift: Tensor
    """`[c, 1, 1]`: inputs are scale · x + shift."""
    crop: int = 0
    """Width of the black border around the image, out of which its size is cut at random."""
    flip: bool = False
    """Left and right change places in every second image."""
    cutout: int = 0
    """Side of the square around a random pixel that is set to the mean; what lies outside the image is not made up for."""

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float], augment: Augment = False, suits: str = "crop+flip") -> Self:
        """Make the view for the channels' `mean` and `std` in [0, 1]; `suits` is the meaning of `augment=True`."""
        crop, flip, cutout = _strengths(augment, suits)
        centre, spread = (torch.tensor(list(values), dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
        return cls((1 / (255 * spread)).float(), (-centre / spread).float(), crop, bool(flip), cutout)

    @property
    def numbers(self) -> int:
        return 5 if self.crop or self.flip or self.cutout else 0

    def inputs(self, x: Tensor) -> Tensor:
        return x.to(self.scale.dtype) * self.scale + self.shift

    def targets(self, y: Tensor) -> Tensor:
        return y

    def augment(self, x: Tensor, u: Tensor) -> Tensor:
        """`u [m, 5]`: row and column of the crop, flip, row and column of the hole's centre."""
        x = self.inputs(self._moved(x, u[:, :3]) if self.crop or self.flip else x)
        return self._holed(x, u[:, 3:]) if self.cutout else x

    def to(self, device: torch.device | str) -> Self:
        return replace(self, scale=self.scale.to(device), shift=self.shift.to(device))

    def _moved(self, x: Tensor, u: Tensor) -> Tensor:
        """Crop and flip in one gather: `rows [m, h]` and `columns [m, w]` of the bordered image."""
        _, channels, height, width = x.shape
        rows = _whole(u[:, 0], 2 * self.crop + 1) + torch.arange(height, device=x.device)
        columns = torch.arange(width, device=x.device).expand(len(x), -1)
        if self.flip:
            columns = torch.where(u[:, 2, None] < 0.5, columns.flip(1), columns)
        columns = _whole(u[:, 1], 2 * self.crop + 1) + columns
        at = rows.unsqueeze(2) * (width + 2 * self.crop) + columns.unsqueeze(1)
        return F.pad(x, (self.crop,) * 4).flatten(2).gather(2, at.view(len(x), 1, -1).expand(-1, channels, -1)).view_as(x)

    def _holed(self, x: Tensor, u: Tensor) -> Tensor:
        rows, columns = (
            (torch.arange(size, device=x.device) - _whole(u[:, axis], size) + self.cutout // 2) for axis, size in enumerate(x.shape[2:])
        )
        inside = [(place >= 0) & (place < self.cutout) for place in (rows, columns)]
        return x.masked_fill((inside[0].unsqueeze(2) & inside[1].unsqueeze(1)).unsqueeze(1), 0.0)


@dataclass(frozen=True)
class Measured(Pixels):
    """Pixels normalised by the statistics of the local rows, which sites replace by common ones."""

    def normalised_by(self, mean: Sequence[float], std: Sequence[float]) -> Measured:
        """Return the same view with other statistics."""
        other = Pixels.of(mean, std).to(self.scale.device)
        return replace(self, scale=other.scale, shift=other.shift)


def _whole(u: Tensor, below: int) -> Tensor:
    """Map `u [m]` in [0, 1) to whole numbers `[m, 1]` in [0, below); float64 keeps the product from rounding up to `below`."""
    return (u.double() * below).long().unsqueeze(1)


def _strengths(asked: Augment, suits: str) -> Iterator[int]:
    """Parse `data_options.augment` into the strengths of crop, flip and cutout; 0 for those not listed."""
    names = suits if asked is True else "" if asked is False else asked
    if not isinstance(names, str):
        raise InputError(f"data_options.augment must be true, false, or some of crop, flip and cutout as in 'crop+flip' (got {asked!r})")
    chosen = [name.strip() for name in names.split("+") if name.strip()]
    for name in chosen:
        if name not in STRENGTHS:
            raise InputError(f"data_options.augment names no '{name}'{nearest(name, STRENGTHS)}")
    return (strength if name in chosen else 0 for name, strength in STRENGTHS.items())
