"""SVHN: house numbers, the cropped digits."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np

from fedrts.data import register
from fedrts.data.cache import Make, cached
from fedrts.data.contract import Data, Recipe
from fedrts.data.official import File, Official, Source
from fedrts.data.pixels import Augment, Pixels
from fedrts.errors import InputError, optional
from fedrts.files import check_expansion

MEAN, STD = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
TRAIN, TEST = "svhn/train_32x32.mat", "svhn/test_32x32.mat"
ADDRESS = "http://ufldl.stanford.edu/housenumbers"
SOURCE = Source(
    (
        File(f"{ADDRESS}/train_32x32.mat", TRAIN, "md5:e26dedcc434d2e4c54c9b2d4a06d8373"),
        File(f"{ADDRESS}/test_32x32.mat", TEST, "md5:eb5a983be6a315427106f1b164d9cef3"),
    ),
    needed=(TRAIN, TEST),
    official=Official(73_257, 26_032, 10),
)


@register("svhn", Recipe(model="resnet18"), SOURCE)
def svhn(folder: Path, augment: Augment = True) -> Data:
    """99,289 photographed digits (3×32×32) of house numbers, 10 classes; 26,032 are test data."""
    SOURCE.require("svhn", folder)
    view = Pixels.of(MEAN, STD, augment, "crop+cutout")  # a digit has a left and a right
    found = cached(folder, "svhn", [folder / TRAIN, folder / TEST], lambda make: _decode(folder, make))
    return Data(found["x"], found["y"], found["test_x"], found["test_y"], classes=10, view=view)


def _decode(folder: Path, make: Make) -> None:
    for prefix, name in (("", TRAIN), ("test_", TEST)):
        images, labels = _arrays(folder / name)
        make(f"{prefix}x", (len(labels), 3, 32, 32), np.uint8)[:] = images.transpose(3, 2, 0, 1)
        make(f"{prefix}y", (len(labels),), np.int64)[:] = labels % 10  # digit 0 has label 10


def _arrays(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images `[32, 32, 3, n]` and labels `[n]`, 1 to 10, of a .mat file."""
    scipy = optional("scipy.io", "images")
    try:
        claimed = sum(math.prod(shape) for name, shape, _ in scipy.whosmat(file) if name in ("X", "y"))
        check_expansion(file, file.stat().st_size, claimed, "get it again")
        content = scipy.loadmat(file, variable_names=["X", "y"])
        images, labels = content["X"], content["y"].reshape(-1)
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{file} has no variable {error}: it is not SVHN's; get it again") from error
    except (OSError, ValueError, TypeError, NotImplementedError, EOFError, zlib.error, scipy.matlab.MatReadError) as error:
        raise InputError(f"{file} is no readable .mat file: {str(error) or type(error).__name__}; get it again") from error
    if images.dtype != np.uint8 or images.shape[:3] != (32, 32, 3) or images.shape[3:] != labels.shape or len(labels) == 0:
        raise InputError(
            f"{file} has X {images.dtype} {images.shape} and {len(labels):,} labels, not uint8 (32, 32, 3, n) and n; get it again"
        )
    if labels.min() < 1 or labels.max() > 10:
        raise InputError(f"{file} has labels from {labels.min()} to {labels.max()}, not 1 to 10; get it again")
    return images, labels
