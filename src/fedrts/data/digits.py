"""scikit-learn's 1,797 handwritten digits, 8×8 pixels: real data that needs no download."""

from __future__ import annotations

import torch

from fedrts.data import register
from fedrts.data.contract import Data, Recipe
from fedrts.sparse import random

RECIPE = Recipe(
    model="mlp",
    settings={
        "rounds": 50,
        "clients": {"total": 20, "per_round": 10, "alpha": 0.5},
        "train": {"lr": 0.2, "batch_size": 16, "epochs": 5},
        "eval": {"every": 1},
    },
    tuned={"mlp": {"train": {"lr": 0.8}, "wire": {"value_type": "int4"}}, "cnn": {"train": {"lr": 1.2}}},
)


@register("digits", RECIPE)
def digits() -> Data:
    """1,797 handwritten digits (8×8, 10 classes), part of scikit-learn; every fifth is test data."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = random.permutation(random.key("digits", "split"), len(bunch.target))
    x = torch.from_numpy(bunch.images).to(torch.float32).div(16).unsqueeze(1)[order]
    y = torch.from_numpy(bunch.target).to(torch.int64)[order]
    test = len(y) // 5
    return Data(x[test:].clone(), y[test:].clone(), x[:test].clone(), y[:test].clone(), classes=10)
