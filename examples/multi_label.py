"""Several labels per sample, from NumPy arrays by the clients' names: which of five topics a short text is about.

python examples/multi_label.py
"""

import sys

import numpy as np
import torch
from sklearn.datasets import make_multilabel_classification
from torch import nn

import fedrts

Arrays = tuple[np.ndarray, np.ndarray]


def newsrooms() -> tuple[dict[str, Arrays], Arrays]:
    """Counts of 40 words and the topics [rows, 5] of six newsrooms' texts, and those of a test set."""
    words, topics = make_multilabel_classification(2100, n_features=40, n_classes=5, n_labels=2, random_state=0)
    words = np.log1p(words).astype(np.float32)
    names = ["north", "east", "south", "west", "coast", "city"]
    rooms = {
        name: (words[start : start + 300], topics[start : start + 300]) for name, start in zip(names, range(0, 1800, 300), strict=True)
    }
    return rooms, (words[1800:], topics[1800:])


def main(short: bool = False) -> None:
    """Train at a quarter of the weights."""
    torch.manual_seed(0)
    clients, test = newsrooms()
    result = fedrts.train(
        model=nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 5)),
        clients=clients,
        test=test,
        task="multilabel",
        method="fedrts",
        density=0.25,
        rounds=8 if short else 40,
        lr=0.3,
        epochs=2,
        batch_size=16,
    )
    found = result.summary
    print(f"F1 {found['f1']:.3f} (micro {found['f1_micro']:.3f}) AUROC {found['auroc']:.3f} density {found['density']:.3f}")
    assert found["auroc"] > (0.7 if short else 0.85)


if __name__ == "__main__":
    main(short="--short" in sys.argv)
