"""`--tune`: measure which engine, kernel and number of slots are fastest for an experiment on this machine, and remember it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedrts.client.order import Order
from fedrts.client.workbench import Workbench
from fedrts.config import Experiment
from fedrts.engines import choice
from fedrts.engines.kinds import kind
from fedrts.engines.settings import EngineSettings
from fedrts.errors import InputError, note
from fedrts.files import write_atomically
from fedrts.runs.build import Assembled, assemble
from fedrts.runs.folder import device_name

BATCHES = 8
"""Most batches of every client in one measurement."""


WARM_UPS, MEASURED = 2, 2


@dataclass(frozen=True)
class Tuned:
    """The result of the measurements."""

    experiment: Experiment
    """With the fastest settings of its engine."""
    samples_per_second: dict[EngineSettings, float]
    """Speed of every candidate, the fastest first."""
    remembered: bool
    """Was it measured before?"""


def tune(experiment: Experiment, data_dir: str | Path | None = None) -> Tuned:
    """Return a resolved experiment with the fastest engine; keys of `[engine]` that are set stay."""
    run = assemble(experiment, data_dir)
    asked = experiment.engine
    if not kind(asked.name).in_process:
        raise InputError(f"--tune measures engines of one process, not '{asked.name}': tune with --engine batched on one of its machines")
    key = _key(run, asked)
    found = _recall(key)
    speeds = found or _measure_all(run, asked)
    if not found:
        _remember(key, speeds)
    best = next(iter(speeds))
    return Tuned(experiment.model_copy(update={"engine": best}), speeds, remembered=bool(found))


def candidates(asked: EngineSettings, run: Assembled) -> list[EngineSettings]:
    """Return the candidates to measure: one at a time, and side by side in either way with all or half of the slots."""
    if run.experiment.guard.deadline:  # which leaves no choice
        return [run.experiment.engine]
    return kind(asked.name).candidates(asked, run.bench, run.plan.per_round)


def _measure_all(run: Assembled, asked: EngineSettings) -> dict[EngineSettings, float]:
    choices = candidates(asked, run)
    if len(choices) == 1:
        return {choices[0]: 0.0}
    speeds = {settings: _measure(run, settings) for settings in choices}
    return dict(sorted(speeds.items(), key=lambda entry: -entry[1]))


def _measure(run: Assembled, settings: EngineSettings) -> float:
    """Measure samples per second of some steps of the first round's clients; their replies are dropped."""
    bench, plan = run.bench, run.plan
    size = bench.training.batch_size
    short = Workbench(bench.module, bench.layout, bench.data, bench.training.but(epochs=1), bench.seed, bench.macs, noise=bench.noise)
    rows = [part[: BATCHES * size] for part in run.rows]
    engine = choice.make(settings, short, rows, run.experiment.eval.batch_size)
    state = run.method.begin(run.setup)
    current = plan.round(min(1, plan.rounds - 1), state.mask)  # most rounds are inner ones
    order = Order.of(plan.exchanges(current)[0], current, run.layout, state, 0)
    clients = plan.sample(0)
    times = []
    for _ in range(WARM_UPS + MEASURED):
        started = time.perf_counter()
        for _ in engine.run(order, clients):
            pass
        if run.experiment.device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sum(short.training.samples(len(rows[client])) for client in clients) / min(times[WARM_UPS:])


def cache_file() -> Path:
    """Return the file that stores measurements."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedrts" / "tuned.json"


def _key(run: Assembled, asked: EngineSettings) -> str:
    """Return everything that a measurement depends on: model, data, clients, training, device, and the user's settings."""
    e = run.experiment
    facts = {
        "model": run.layout.fingerprint,
        "data": [e.data, *run.data.input_shape],
        "clients": [e.clients.per_round, run.identity["clients"]],
        "train": [e.train.batch_size, e.train.optimizer, e.train.momentum, e.method],
        "device": device_name(e.device),
        "torch": torch.__version__,
        "asked": asked.model_dump(),
        "deadline": bool(e.guard.deadline),
    }
    return json.dumps(facts, sort_keys=True)


def _read() -> dict[str, Any]:
    try:
        content = json.loads(cache_file().read_text("utf-8"))
    except (OSError, ValueError):  # a damaged file is measured anew
        return {}
    return content if isinstance(content, dict) else {}


def _recall(key: str) -> dict[EngineSettings, float]:
    try:
        return {EngineSettings(**entry["settings"]): float(entry["samples_per_second"]) for entry in _read().get(key, [])}
    except (TypeError, KeyError, ValueError):
        return {}


def _remember(key: str, speeds: dict[EngineSettings, float]) -> None:
    entries = [{"settings": settings.model_dump(), "samples_per_second": speed} for settings, speed in speeds.items()]
    try:
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache_file(), json.dumps(_read() | {key: entries}, indent=1).encode())
    except OSError as error:
        note(f"what was measured is not remembered: cannot write {cache_file()}: {error.strerror}")
