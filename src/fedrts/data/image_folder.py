"""Your own images: a folder per class."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from fedrts.data import register
from fedrts.data.cache import Make, cached
from fedrts.data.contract import Data, Recipe
from fedrts.data.images import decode, listed, size_of
from fedrts.data.own import normalised, with_test_share
from fedrts.data.pixels import Augment
from fedrts.errors import InputError

RECIPE = Recipe(model="cnn", settings={"eval": {"every": 1}})


@register("folder:PATH", RECIPE)
def image_folder(path: Path, folder: Path, size: int | None = None, augment: Augment = False, test: float = 0.2) -> Data:
    """Your own images: PATH/<class>/*.png or .jpg, or PATH/train/<class>/… with PATH/test/<class>/…; `size` resizes them.

    Without a test folder the share `test` of the images, the same in every run, is test data.
    """
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise InputError(f"data_options.size must be a number of pixels ≥ 1 (got {size!r})")
    split = (path / "train").is_dir() and (path / "test").is_dir()
    roots = [path / "train", path / "test"] if split else [path]
    classes = _folders(roots[0])
    if split and (missing := sorted(set(classes) ^ set(_folders(roots[1])))):
        raise InputError(f"{path}: class '{missing[0]}' is in only one of train and test; every class needs a folder in both")
    parts = [[listed(root / name) for name in classes] for root in roots]
    files = [file for part in parts for images in part for file in images]
    shape = (size, size) if size else size_of(files[0])

    def fill(make: Make) -> None:
        make("y", (len(files),), np.int64)[:] = [label for part in parts for label, images in enumerate(part) for _ in images]
        out = make("x", (len(files), 3, *shape), np.uint8)
        decode(files, out, resize=size is not None, remedy="give all images one size, with data_options.size say")

    name = f"folder{hashlib.blake2b(os.path.abspath(path).encode(), digest_size=6).hexdigest()}size{size or 0}"
    found = cached(folder, name, files, fill)
    count = sum(map(len, parts[0]))
    x, y = found["x"], found["y"]
    held = Data(x[:count], y[:count], x[count:], y[count:], classes=len(classes))
    return normalised(held if split else with_test_share(held, test), augment)


def _folders(root: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise InputError(f"there is no folder {root}: --data folder:PATH names one with a folder of images for every class") from error
    if len(names) < 2:
        raise InputError(f"{root} holds {len(names)} folders: there must be one for each of at least two classes")
    return names
