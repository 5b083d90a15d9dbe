"""CINIC-10 in its official folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedrts.data import register
from fedrts.data.cache import Make, cached
from fedrts.data.contract import Data, Recipe
from fedrts.data.images import decode, listed
from fedrts.data.official import File, Official, Source
from fedrts.data.pixels import Augment, Pixels
from fedrts.errors import InputError

MEAN, STD = (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)
FOLDER = "cinic-10"
ADDRESS = "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SPLITS = ("train", "valid", "test")
SOURCE = Source(
    (File(ADDRESS, FOLDER, "md5:6ee4d0c996905fe93221de577967a372", archive=True),),
    needed=tuple(f"{FOLDER}/{split}" for split in SPLITS),
    official=Official(90_000, 90_000, 10),
)


@register("cinic10", Recipe(model="resnet18"), SOURCE)
def cinic10(folder: Path, augment: Augment = True, train: str = "train", validation: bool | None = None) -> Data:
    """270,000 photographs (3×32×32) of 10 kinds of things in three equal parts: train, valid, test.

    The part `valid` is the validation set (`validation=False`: unused), or with `train="train+valid"` training data.
    """
    SOURCE.require("cinic10", folder)
    if train not in ("train", "train+valid"):
        raise InputError(f"data_options.train must be 'train' or 'train+valid' (got {train!r})")
    if validation not in (True, False, None) or (validation and train != "train"):
        raise InputError(
            f"data_options.validation of cinic10 must be true or false, and false where its part is trained on (got {validation})"
        )
    view = Pixels.of(MEAN, STD, augment, "crop+flip+cutout")
    files = {split: [listed(folder / FOLDER / split / name, (".png",)) for name in CLASSES] for split in SPLITS}
    every = [file for parts in files.values() for part in parts for file in part]

    def fill(make: Make) -> None:
        make("y", (len(every),), np.int64)[:] = [label for parts in files.values() for label, part in enumerate(parts) for _ in part]
        decode(every, make("x", (len(every), 3, 32, 32), np.uint8))

    found = cached(folder, "cinic10", every, fill)
    sizes = [sum(map(len, parts)) for parts in files.values()]
    (x, valid_x, test_x), (y, valid_y, test_y) = found["x"].split(sizes), found["y"].split(sizes)
    if train == "train+valid":
        x, y = found["x"][: -sizes[2]], found["y"][: -sizes[2]]
    used = train == "train" and validation is not False
    return Data(x, y, test_x, test_y, 10, view=view, valid_x=valid_x if used else None, valid_y=valid_y if used else None)
