"""Image files as one array, and the statistics of their pixels."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrts.errors import InputError, optional
from fedrts.files import require_plain

MOST_PIXELS = 2**26
"""Most pixels of one image: 8,192 × 8,192; a small file may claim any number."""
FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP")
"""What is decoded, whatever a file is called: for some other formats Pillow would start programs."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".JPEG", ".JPG", ".PNG")


def listed(folder: str | Path, suffixes: Sequence[str] = SUFFIXES) -> list[str]:
    """Return the image files of a folder by name; at least one."""
    try:
        found = [(entry.path, entry.is_file()) for entry in os.scandir(folder) if entry.name.endswith(tuple(suffixes))]
    except OSError as error:
        raise InputError(f"there is no folder {folder}: every class has one with its images") from error
    for path, is_file in found:
        if not is_file:
            require_plain(path)
    files = sorted(path for path, _ in found)
    if not files:
        raise InputError(f"there are no images in {folder}: every class needs at least one {' or '.join(sorted(set(suffixes)))} file")
    return files


def size_of(file: str) -> tuple[int, int]:
    """Return height and width of an image file."""
    height, width, _ = _pixels(file, None).shape
    return height, width


def decode(files: Sequence[str], out: np.ndarray, resize: bool = False, remedy: str = "get it again") -> None:
    """Decode the images of `files` into rows of `out [n, 3, h, w]`, uint8; they must have that size or are resized."""
    size = out.shape[2:]
    for file, row in zip(files, out, strict=True):
        pixels = _pixels(file, size if resize else None)
        if pixels.shape[:2] != size:
            found, wanted = (f"{shape[1]}×{shape[0]}" for shape in (pixels.shape, size))
            raise InputError(f"{file} has {found} pixels, not {wanted} as it should: {remedy}")
        row[:] = pixels.transpose(2, 0, 1)


def statistics(x: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of every channel of `x [n, c, h, w]`, uint8, in [0, 1]; never 0."""
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(x.shape[1]):
        counts = sum(torch.bincount(part[:, channel].flatten(), minlength=256) for part in x.split(4096))
        share = torch.as_tensor(counts, dtype=torch.float64) / (x.numel() // x.shape[1])
        mean.append(float(share @ values))
        std.append(max(float(share @ values.square()) - mean[-1] ** 2, 0.0) ** 0.5 or 1.0)
    return mean, std


def _pixels(file: str, size: tuple[int, int] | None) -> np.ndarray:
    """Decode an image file to `[h, w, 3]`."""
    image = optional("PIL.Image", "images")
    try:
        with _bombs_as_errors(image), image.open(file, formats=FORMATS) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise InputError(f"{file} has {opened.width}×{opened.height} pixels, more than {MOST_PIXELS:,}: make it smaller first")
            picture = _eight_bit(file, opened).convert("RGB")
            return np.asarray(picture.resize(size[::-1], image.Resampling.BILINEAR) if size else picture)
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, image.DecompressionBombError, image.DecompressionBombWarning) as error:
        raise InputError(f"{file} is no readable image: {error}; get it again") from error


@contextlib.contextmanager
def _bombs_as_errors(image: Any) -> Iterator[None]:
    """Turn Pillow's warnings about oversized images into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", image.DecompressionBombWarning)
        yield


def _eight_bit(file: str, opened: Any) -> Any:
    """Scale an image to 8 bits; Pillow would clip larger values instead."""
    if opened.mode.startswith("I;16") or (opened.mode == "I" and opened.format == "PNG"):  # 16 bits, in newer and older Pillow
        return optional("PIL.Image", "images").fromarray((np.asarray(opened) >> 8).astype(np.uint8))
    if opened.mode in ("I", "F"):
        raise InputError(f"{file} has pixels of 32 bits, whose range is unknown: save it with 8 or 16 bits per channel")
    return opened
