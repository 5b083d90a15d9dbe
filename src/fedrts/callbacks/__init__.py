"""Callbacks: your own code that watches a run and may stop it; `@register("name")` gives a class a name.

class Shout(Callback):
    def on_round(self, round: RoundView) -> None:
        print(round.index, round.metrics)

fedrts.run(data="digits", rounds=20, callbacks=[Shout(), EarlyStopping(patience=5)])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedrts.registry import Registry

if TYPE_CHECKING:
    from fedrts.callbacks.best import BestModel as BestModel
    from fedrts.callbacks.contract import Callback as Callback
    from fedrts.callbacks.contract import EndView as EndView
    from fedrts.callbacks.contract import OuterView as OuterView
    from fedrts.callbacks.contract import RoundView as RoundView
    from fedrts.callbacks.contract import RunView as RunView
    from fedrts.callbacks.csv import CSV as CSV
    from fedrts.callbacks.stopping import EarlyStopping as EarlyStopping
    from fedrts.callbacks.trackers import MLflow as MLflow
    from fedrts.callbacks.trackers import WandB as WandB
    from fedrts.callbacks.watching import ProgressBar as ProgressBar
    from fedrts.callbacks.watching import TensorBoard as TensorBoard

callbacks: Registry[Any] = Registry("callback", __name__)
"""Classes, or functions, that make a callback without being told anything."""
register = callbacks.register
names = callbacks.names
get = callbacks.get

_HOMES = dict.fromkeys(("Callback", "EndView", "OuterView", "RoundView", "RunView"), "contract")
_HOMES |= {"BestModel": "best", "CSV": "csv", "EarlyStopping": "stopping", "MLflow": "trackers", "WandB": "trackers"}
_HOMES |= {"ProgressBar": "watching", "TensorBoard": "watching"}

__all__ = [*_HOMES, "callbacks", "get", "names", "register"]


def __getattr__(name: str) -> Any:
    """Import every class on first use."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
