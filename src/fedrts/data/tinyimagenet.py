"""Tiny ImageNet in its official folder; the validation images serve as test data, since the test images have no labels."""

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

MEAN, STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
FOLDER = "tiny-imagenet-200"
SOURCE = Source(
    (File("http://cs231n.stanford.edu/tiny-imagenet-200.zip", FOLDER, "md5:90528d7ca1a48142e341f4ef8d21d0de", archive=True),),
    needed=tuple(f"{FOLDER}/{path}" for path in ("wnids.txt", "train", "val/val_annotations.txt", "val/images")),
    official=Official(100_000, 10_000, 200),
)


@register("tinyimagenet", Recipe(model="resnet18"), SOURCE)
def tinyimagenet(folder: Path, augment: Augment = True) -> Data:
    """110,000 photographs (3×64×64) of 200 kinds of things (fewer if wnids.txt lists fewer); 10,000 are test data."""
    SOURCE.require("tinyimagenet", folder)
    root = folder / FOLDER
    view = Pixels.of(MEAN, STD, augment, "crop+flip")
    classes = (root / "wnids.txt").read_text("utf-8").split()
    train = [listed(root / "train" / name / "images", (".JPEG",)) for name in classes]
    test = _annotated(root / "val", {name: label for label, name in enumerate(classes)})
    images = [file for files in train for file in files]
    sources = [str(root / "wnids.txt"), str(root / "val" / "val_annotations.txt"), *images, *test]

    def fill(make: Make) -> None:
        labels = [label for label, files in enumerate(train) for _ in files]
        for prefix, files, y in (("", images, labels), ("test_", list(test), list(test.values()))):
            make(f"{prefix}y", (len(y),), np.int64)[:] = y
            decode(files, make(f"{prefix}x", (len(y), 3, 64, 64), np.uint8))

    found = cached(folder, "tinyimagenet", sources, fill)
    return Data(found["x"], found["y"], found["test_x"], found["test_y"], classes=len(classes), view=view)


def _annotated(folder: Path, labels: dict[str, int]) -> dict[str, int]:
    """Return the image files of `val` and their labels, in the order of val_annotations.txt: file, class, box."""
    found = {}
    for number, line in enumerate((folder / "val_annotations.txt").read_text("utf-8").splitlines(), 1):
        name, _, rest = line.partition("\t")
        if (kind := rest.partition("\t")[0]) not in labels:
            raise InputError(f"{folder / 'val_annotations.txt'}, line {number}: class '{kind}' is not in wnids.txt; get the data set again")
        found[str(folder / "images" / name)] = labels[kind]
    if not found:
        raise InputError(f"{folder / 'val_annotations.txt'} is empty; get the data set again")
    return found
