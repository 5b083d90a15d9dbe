"""CIFAR-10 in its binary release."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedrts.data import register
from fedrts.data.cache import Make, cached
from fedrts.data.contract import Data, Recipe
from fedrts.data.official import File, Official, Source
from fedrts.data.pixels import Augment, Pixels
from fedrts.errors import InputError

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
FOLDER = "cifar-10-batches-bin"
TRAIN, TEST = [f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"]
ROW = 1 + 3 * 32 * 32
"""A label and the planes of an image, in bytes."""
SOURCE = Source(
    (File("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", FOLDER, "md5:c32a1d4ab5d03f1284b67883e8d87530", archive=True),),
    needed=tuple(f"{FOLDER}/{name}" for name in TRAIN + TEST),
    official=Official(50_000, 10_000, 10, {"y": (6, 9, 9, 4, 1, 1, 2, 7, 8, 3), "x": (59, 43, 50, 68, 98, 119)}),
)


@register("cifar10", Recipe(model="resnet18", tuned={"resnet18_small": {"train": {"lr": 1.0}}}), SOURCE)
def cifar10(folder: Path, augment: Augment = True) -> Data:
    """60,000 photographs (3×32×32) of 10 kinds of things; 10,000 are test data."""
    SOURCE.require("cifar10", folder)
    view = Pixels.of(MEAN, STD, augment, "crop+flip+cutout")
    found = cached(folder, "cifar10", [folder / path for path in SOURCE.needed], lambda make: _decode(folder / FOLDER, make))
    return Data(found["x"], found["y"], found["test_x"], found["test_y"], classes=10, view=view)


def _decode(folder: Path, make: Make) -> None:
    for prefix, names in (("", TRAIN), ("test_", TEST)):
        batches = [_rows(folder / name) for name in names]
        count = sum(map(len, batches))
        x, y = make(f"{prefix}x", (count, 3, 32, 32), np.uint8), make(f"{prefix}y", (count,), np.int64)
        np.concatenate([batch[:, 1:].reshape(-1, 3, 32, 32) for batch in batches], out=x)
        np.concatenate([batch[:, 0] for batch in batches], out=y)


def _rows(file: Path) -> np.ndarray:
    """Read `[n, 3073]` from a batch file."""
    content = np.fromfile(file, np.uint8)
    if len(content) == 0 or len(content) % ROW:
        raise InputError(f"{file} is damaged: {len(content):,} bytes are no whole number of images ({ROW:,} bytes each); get it again")
    rows = content.reshape(-1, ROW)
    if rows[:, 0].max() > 9:
        raise InputError(f"{file} is damaged: it has the label {rows[:, 0].max()}, labels are 0 to 9; get it again")
    return rows
