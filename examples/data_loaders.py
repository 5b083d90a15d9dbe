"""DataLoaders that are there already: their datasets and collate functions are used, and what has no meaning here is named.

python examples/data_loaders.py
"""

import sys
import warnings

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fedrts
from fedrts.errors import Note


class Scans(Dataset[dict[str, object]]):
    """Handwritten digits of one writer, as a dictionary a sample."""

    def __init__(self, start: int, stop: int) -> None:
        images, digits = load_digits(return_X_y=True)
        self.images, self.digits = images[start:stop], digits[start:stop]

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"image": self.images[index], "digit": self.digits[index]}


def batch(samples: list[dict[str, object]]) -> tuple[Tensor, Tensor]:
    """Pixels from 0 to 1, and digits."""
    images = torch.stack([torch.as_tensor(sample["image"]) for sample in samples])
    return images.float() / 16, torch.tensor([int(sample["digit"]) for sample in samples])  # type: ignore[call-overload]


def main(short: bool = False) -> None:
    """Train at a quarter of the weights."""
    torch.manual_seed(0)
    writers = [DataLoader(Scans(start, start + 150), batch_size=32, shuffle=True, collate_fn=batch) for start in range(0, 1500, 150)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Note)
        result = fedrts.train(
            model=nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
            clients=writers,
            test=DataLoader(Scans(1500, 1797), batch_size=256, collate_fn=batch),
            method="fedrts",
            density=0.25,
            rounds=8 if short else 25,
            lr=0.2,
            epochs=2,
            batch_size=16,
        )
    print(next(str(entry.message) for entry in caught if "DataLoaders" in str(entry.message)))
    print(f"accuracy {result.summary['accuracy']:.3f} density {result.summary['density']:.3f}")
    assert result.summary["accuracy"] > (0.5 if short else 0.85)


if __name__ == "__main__":
    main(short="--short" in sys.argv)
