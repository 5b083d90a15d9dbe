"""The engines that there are, and what others need to know of one: nobody else asks for its name."""

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
    """The engine of a name."""
    found: EngineKind = pkgutil.resolve_name(KINDS[name])()
    return found


class EngineKind(ABC):
    """An engine as others see it before it runs."""

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
        """The table `[engine]`, with another engine where this one would make nothing of a part of the experiment."""
        return experiment.engine

    def refuses(self, experiment: Experiment) -> str | None:
        """Why it cannot run an experiment, and the remedy, in one line; None if it can."""
        precision = experiment.engine.precision
        if precision != "float32" and not experiment.device.startswith("cuda"):
            return f"engine.precision = '{precision}' needs a GPU: this run is on {experiment.device}; use float32"
        if precision == "bf16" and not self.bf16:
            return "engine.precision = 'bf16' needs the batched engine: set engine.name = 'batched', or use tf32"
        return None

    def require(self) -> None:
        """An `InputError` where a package is missing that it needs."""
        return

    @abstractmethod
    def decided(self, asked: EngineSettings, bench: Workbench, per_round: int) -> EngineSettings:
        """`asked` with nothing left open: a pure function of model, data and device."""

    @abstractmethod
    def make(self, settings: EngineSettings, bench: Workbench, rows: Sequence[Tensor], eval_batch_size: int) -> Engine:
        """What of it works in this process, of settings that are decided; the others' servers only evaluate."""

    @contextlib.contextmanager
    def open(self, run: Assembled, folder: Path | None, data_dir: str | Path | None, door: Door | None) -> Iterator[Assembled]:
        """A run with its engine ready to play; what was started for it ends with the block."""
        yield run

    def candidates(self, asked: EngineSettings, bench: Workbench, per_round: int) -> list[EngineSettings]:
        """What is worth measuring on this machine."""
        return []

    def foreign(self, address: str) -> list[str]:
        """What of its settings leads to code of others: whoever follows it must be allowed to."""
        return []
