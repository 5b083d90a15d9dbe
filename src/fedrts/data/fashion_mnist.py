"""Fashion-MNIST in its gzipped idx files."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from fedrts.data import register
from fedrts.data.cache import Make, cached
from fedrts.data.contract import Data, Recipe
from fedrts.data.official import File, Official, Source
from fedrts.data.pixels import Augment, Pixels
from fedrts.errors import InputError
from fedrts.files import check_expansion, most_expanded

MEAN, STD = (0.2860,), (0.3530,)
FOLDER = "fashion-mnist"
ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
SOURCE = Source(
    tuple(File(f"{ADDRESS}/{name}", f"{FOLDER}/{name}", checksum) for name, checksum in CHECKSUMS.items()),
    needed=tuple(f"{FOLDER}/{name}" for name in CHECKSUMS),
    official=Official(60_000, 10_000, 10, {"y": (9, 0, 0, 3, 0, 2, 7, 2, 5, 5)}),
)
RECIPE = Recipe(model="cnn", settings={"rounds": 100, "train": {"lr": 0.1}})


@register("fashion_mnist", RECIPE, SOURCE)
def fashion_mnist(folder: Path, augment: Augment = False) -> Data:
    """70,000 photographs (1×28×28) of 10 kinds of clothes; 10,000 are test data."""
    SOURCE.require("fashion_mnist", folder)
    view = Pixels.of(MEAN, STD, augment, "crop+flip")
    found = cached(folder, "fashion_mnist", [folder / path for path in SOURCE.needed], lambda make: _decode(folder / FOLDER, make))
    return Data(found["x"], found["y"], found["test_x"], found["test_y"], classes=10, view=view)


def _decode(folder: Path, make: Make) -> None:
    for prefix, name in (("", "train"), ("test_", "t10k")):
        images = _idx(folder / f"{name}-images-idx3-ubyte.gz", (28, 28))
        labels = _idx(folder / f"{name}-labels-idx1-ubyte.gz", ())
        if len(images) != len(labels) or len(labels) == 0:
            raise InputError(f"{folder} has {len(images):,} {name} images with {len(labels):,} labels; get them again")
        if labels.max() > 9:
            raise InputError(f"{folder}/{name}-labels-idx1-ubyte.gz has the label {labels.max()}, labels are 0 to 9; get it again")
        make(f"{prefix}x", (len(labels), 1, 28, 28), np.uint8)[:, 0] = images
        make(f"{prefix}y", (len(labels),), np.int64)[:] = labels


def _idx(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read `[n, *shape]` from an idx file: magic number (0, 0, 8 for bytes, dimensions), sizes, bytes."""
    try:
        most = most_expanded(file.stat().st_size)
        with gzip.open(file) as opened:
            content = opened.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file} is no complete gzip file: {error}; get it again") from error
    check_expansion(file, file.stat().st_size, len(content), "get it again")
    header = 4 * (2 + len(shape))
    sizes = tuple(int.from_bytes(content[start : start + 4], "big") for start in range(4, header, 4))
    if content[:4] != bytes([0, 0, 8, 1 + len(shape)]) or sizes[1:] != shape or len(content) - header != math.prod(sizes):
        raise InputError(f"{file} is damaged: it is no idx file of bytes with entries of shape {shape}; get it again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)
