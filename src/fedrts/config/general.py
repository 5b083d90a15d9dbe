"""The tuned recipe for unmeasured problems: settings that held wherever we measured (docs/recipes.md has the tables)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GENERAL: Mapping[str, Any] = {
    "topology": {"init_scale": "sparse"},  # signals keep their strength through a sparse network
    "train": {"lr": 0.1, "schedule": "cosine", "average": "tail"},  # below the best rate of every problem measured, far above 0.01
    "wire": {"value_type": "int8"},  # a quarter of the bytes at no measured loss: spend them on density
}
