"""Small federations: toy images and toy text, registered like any user's data set, and runs on them that take moments."""

from __future__ import annotations

from typing import Any

import torch

from fedrts import config, data, methods
from fedrts.data.contract import Data
from fedrts.runs.build import Assembled, assemble
from fedrts.tasks import Language


@data.register("toy_images")
def toy_images() -> Data:
    """120 noisy 1×6×6 images of three classes."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(160) % 3
    x = torch.randn(160, 1, 6, 6, generator=generator) + y.view(-1, 1, 1, 1)
    return Data(x[:120], y[:120], x[120:], y[120:], classes=3)


@data.register("toy_text")
def toy_text() -> Data:
    """Sequences that count upwards from a random start; the last two tokens are padding."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 20, (90, 1), generator=generator)
    tokens = (start + torch.arange(9)) % 20
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[:, -2:] = -100
    return Data(x[:60], y[:60], x[60:], y[60:], classes=20, task=Language())


TOYS = {
    "mlp": ("toy_images", {"hidden": [12, 10]}),
    "cnn": ("toy_images", {"width": 4}),
    "tiny_gpt": ("toy_text", {"width": 8, "layers": 1, "heads": 2}),
}


def toy(method: str = "fedrts", model: str = "mlp", **keywords: Any) -> Assembled:
    """Assemble a small run: `toy("fedrts", "cnn", rounds=5, …)`."""
    name, options = TOYS[model]
    base = {
        "recipe": "paper",
        "method": method,
        "model": model,
        "data": name,
        "model_options": options,
        "density": 1.0 if methods.get(method).dense else 0.5,
        "rounds": 7,
        "clients": {"total": 5, "per_round": 3, "partition": "iid", "min_size": 1},
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.1},
        "topology": {"interval": 3, "end": 6},
        "engine": "serial",
    }
    return assemble(config.resolve(base, config.from_keywords(keywords)))
