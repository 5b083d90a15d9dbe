"""Flower as an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fedrts.client.workbench import Workbench
from fedrts.engines.kinds import EngineKind
from fedrts.engines.serial import SerialEngine
from fedrts.engines.settings import EngineSettings
from fedrts.flower import prepare

if TYPE_CHECKING:
    from fedrts.flower.deployment import Door
    from fedrts.runs.build import Assembled


class Nodes(EngineKind):
    """Clients on nodes, here or on other machines; the server itself only evaluates."""

    in_process = False
    bf16 = False
    has_sites = True

    def decided(self, asked: EngineSettings, bench: Workbench, per_round: int) -> EngineSettings:
        return asked

    def make(self, settings: EngineSettings, bench: Workbench, rows: Sequence[Tensor], eval_batch_size: int) -> SerialEngine:
        return SerialEngine(bench, rows, eval_batch_size)

    @contextlib.contextmanager
    def open(self, run: Assembled, folder: Path | None, data_dir: str | Path | None, door: Door | None) -> Iterator[Assembled]:
        prepare()
        from fedrts.flower.deployment import engaged

        with engaged(run, folder, data_dir, door) as ready:
            yield ready
