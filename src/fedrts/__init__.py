"""fedrts: federated learning of sparse models."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedrts.api import Result as Result
    from fedrts.api import fine_tune as fine_tune
    from fedrts.api import inputs as inputs
    from fedrts.api import load as load
    from fedrts.api import resume as resume
    from fedrts.api import run as run
    from fedrts.api import train as train
    from fedrts.comparison import compare as compare
    from fedrts.costs import cost as cost
    from fedrts.planning import plan as plan

__version__ = "0.2.0"

__all__ = ["InputError", "Result", "callbacks", "compare", "cost", "data", "fine_tune", "inputs", "load", "methods"]
__all__ += ["models", "plan", "report", "resume", "run", "train"]

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # by default threads spin at barriers for milliseconds: on a busy machine a core lost

_HOMES = dict.fromkeys(("Result", "fine_tune", "inputs", "load", "resume", "run", "train"), "fedrts.api")
_HOMES |= {"compare": "fedrts.comparison", "cost": "fedrts.costs", "plan": "fedrts.planning", "InputError": "fedrts.errors"}


def __getattr__(name: str) -> Any:
    """Import everything on first use, so that `import fedrts` and `fedrts --help` are fast."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__:
        return importlib.import_module(f"fedrts.{name}")
    raise AttributeError(f"module 'fedrts' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what `fedrts.<TAB>` offers, without importing it."""
    return sorted([*__all__, "__version__"])
