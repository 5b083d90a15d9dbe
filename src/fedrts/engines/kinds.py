"""The kinds of engines and what others need to know about each; no other module asks for an engine's name."""

from __future__ import annotations

import contextlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fedrts.client.workbench import Workbench
from fedrts.engines.settings import EngineName, EngineSettings
from fedrts.server.engine import Engine

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.flower.deployment import Door
    from fedrts.runs.build import Assembled

KINDS: dict[EngineName, str] = {
    "auto": "fedrts.engines.choice:Auto",
    "serial": "fedrts.engines.serial:Serial",
    "batched": "fedrts.engines.choice:Batched",
    "flower": "fedrts.flower.nodes:Nodes",
    "ray": "fedrts.engines.ray:Actors",
}
"""Where each is, which is looked up when it is asked for: some lie in rooms above this one."""


@cache
def kind(name: EngineName) -> EngineKind:
    """Return the engine kind of a name."""
    found: EngineKind = pkgutil.resolve_name(KINDS[name])()
    return found


class EngineKind(ABC):
    """What others need to know about an engine before it runs."""

    in_process: ClassVar[bool] = True
    """Do the clients run in this very process, so that it can be measured here?"""
    side_by_side: ClassVar[bool] = False
    """Are there slots in which clients train at the same time?"""
    bf16: ClassVar[bool] = True
    """Can clients train in bf16?"""
    has_sites: ClassVar[bool] = False
    """May the clients' data be on other machines?"""
    chooses: ClassVar[bool] = False
    """Does it take what is faster, the sparse kernel too?"""
    has_cluster: ClassVar[bool] = False
    """Are there machines on which the cells of a comparison may run too?"""

    def suited(self, experiment: Experiment) -> EngineSettings:
        """Return the table `[engine]`, with another engine if this one would ignore part of the experiment."""
        return experiment.engine

    def refuses(self, experiment: Experiment) -> str | None:
        """Return why it cannot run an experiment, and the remedy, in one line; None if it can."""
        precision = experiment.engine.precision
        if precision != "float32" and not experiment.device.startswith("cuda"):
            return f"engine.precision = '{precision}' needs a GPU: this run is on {experiment.device}; use float32"
        if precision == "bf16" and not self.bf16:
            return "engine.precision = 'bf16' needs the batched engine: set engine.name = 'batched', or use tf32"
        return None

    def require(self) -> None:
        """Raise an `InputError` if a package that it needs is missing."""
        return

    @abstractmethod
    def decided(self, asked: EngineSettings, bench: Workbench, per_round: int) -> EngineSettings:
        """Return `asked`, fully decided: a pure function of model, data and device."""

    @abstractmethod
    def make(self, settings: EngineSettings, bench: Workbench, rows: Sequence[Tensor], eval_batch_size: int) -> Engine:
        """Make the part of it that works in this process, from decided settings; the others' servers only evaluate."""

    @contextlib.contextmanager
    def open(self, run: Assembled, folder: Path | None, data_dir: str | Path | None, door: Door | None) -> Iterator[Assembled]:
        """Open a run with its engine ready; whatever was started for it ends with the block."""
        yield run

    def candidates(self, asked: EngineSettings, bench: Workbench, per_round: int) -> list[EngineSettings]:
        """Return the candidates worth measuring on this machine."""
        return []

    def foreign(self, address: str) -> list[str]:
        """Return its settings that lead to others' code, which must be allowed."""
        return []
