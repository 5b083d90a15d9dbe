"""Your own images: a folder with a folder of PNG or JPEG files for every class.

    python examples/folder_data.py [FOLDER]

Without FOLDER it draws a few hundred small pictures of crosses and circles first. The command line does the same:

    fedrts run --data folder:FOLDER --set data_options.size=32 --set data_options.augment=crop+flip
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import fedrts


def draw(folder: Path, each: int = 120, size: int = 16) -> None:
    """folder/cross/*.png and folder/circle/*.png."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:size, :size]
    for name in ("cross", "circle"):
        (folder / name).mkdir(parents=True)
        for index in range(each):
            y, x = rng.integers(5, size - 5, 2)
            away = np.abs(rows - y), np.abs(columns - x)
            cross = (np.minimum(*away) == 0) & (np.maximum(*away) <= 4)
            shape = cross if name == "cross" else np.abs(np.hypot(*away) - 4) < 0.6
            colour = rng.integers(120, 255, 3)
            picture = rng.integers(0, 60, (size, size, 3)) + shape[..., None] * (colour - 60).clip(0)
            Image.fromarray(picture.astype(np.uint8)).save(folder / name / f"{index}.png")


def main(folder: Path) -> None:
    """Train a small convolutional network at a third of its weights; every fifth image is test data."""
    cache = folder.parent / "decoded"  # images are decoded once; ~/.cache/fedrts if it is left out
    options = {"rounds": 12, "clients": 6, "per_round": 4, "lr": 0.1, "epochs": 3, "batch_size": 8}
    run = folder.parent / "run"
    result = fedrts.run(data=f"folder:{folder}", model="cnn", density=0.35, data_dir=cache, out=run, **options)
    print(f"accuracy {result.summary['accuracy']:.3f} density {result.summary['density']:.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            draw(Path(temporary) / "shapes")
            main(Path(temporary) / "shapes")
