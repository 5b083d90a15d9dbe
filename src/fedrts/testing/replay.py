"""Replay of a federation's run by the serial engine: its history says whose replies counted in which round."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fedrts import config
from fedrts.engines.serial import SerialEngine
from fedrts.methods.contract import State
from fedrts.runs.build import Assembled, assemble
from fedrts.server.rounds import Plan, play


@dataclass(frozen=True)
class Replay(Plan):
    """A plan that asks in each round only the clients whose replies counted."""

    counted: Sequence[Sequence[int]] = ()

    def sample(self, index: int, attempt: int = 0, quarantined: Collection[int] = ()) -> list[int]:
        return list(self.counted[max(index, 0)])


def replayed(folder: Path) -> tuple[Assembled, State]:
    """The experiment of a finished run folder, and the state that its history leads to."""
    settings = config.from_file(folder / "experiment.toml")
    run = assemble(config.resolve(settings, {"engine": {"name": "serial"}, "guard": {"quorum": 1e-9}}))
    assert isinstance(run.plan.engine, SerialEngine)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text("utf-8").splitlines()]
    same = {field.name: getattr(run.plan, field.name) for field in fields(Plan)}
    plan = Replay(**same, counted=[line["clients"] for line in lines if line["round"] >= 0])
    state, first = run.begun()
    for played in play(plan, state, first):
        state = played.state
    return replace(run, plan=plan), state
