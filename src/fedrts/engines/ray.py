"""Many devices, many machines: Ray actors that each run an engine over a share of the round's clients.

An actor gets the data once, through Ray's object store (of which all actors on a machine see the same memory), and in every round one
order, which is the same for all, and the numbers of its clients. It judges and adds up their replies itself. So sums come back and no
client's model: traffic follows actors × model. Shares and the order in which their sums are added are a function of the round's clients
alone, and a share that was lost with its actor is worked through again: the result has the same bits, whatever happened on the way.
What clients remember (error feedback) stays with the server, and comes and goes with them: traffic then follows clients × model.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedrts import trees
from fedrts.client.order import Failure, Order, Reply
from fedrts.client.workbench import Workbench
from fedrts.data.contract import Data
from fedrts.data.holdings import Holdings
from fedrts.engines import choice
from fedrts.engines.kinds import EngineKind, kind
from fedrts.engines.serial import SerialEngine
from fedrts.engines.settings import EngineSettings
from fedrts.engines.slots import schedule
from fedrts.errors import InputError, note, optional, reason
from fedrts.methods.contract import State
from fedrts.registry import permit
from fedrts.server import reducers
from fedrts.server.collect import Question, Tally, add_up
from fedrts.server.engine import Engine, arrivals
from fedrts.tasks import Metrics

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.flower.deployment import Door
    from fedrts.runs.build import Assembled

RETRIES = 3
"""How often a share is tried again when its actor dies."""
FAN_IN = 8
"""Tallies that are added in one place."""
ACTORS_ON_CPU = 2
_SPARE_STORE = 2**28
"""Bytes of the object store beside data and sums."""


class Actors(EngineKind):
    """The engine on Ray actors, on this machine or many; the server itself only evaluates."""

    in_process = False
    has_cluster = True

    def refuses(self, experiment: Experiment) -> str | None:
        """Return what cannot be divided among actors either."""
        guard = experiment.guard
        if (setting := reducers.unlike(guard, "mergeable")) is not None:
            return (
                f"{setting} needs every client's weights in one place, and ray's actors send back sums: "
                f"use {reducers.those('mergeable')}, or --engine batched"
            )
        for name in ("deadline", "over_select"):
            if getattr(guard, name):
                return f"guard.{name} tells early replies from late ones, and ray's actors send back sums: set it to 0, or --engine serial"
        return super().refuses(experiment)

    def require(self) -> None:
        if find_spec("ray") is None:
            optional("ray", "ray")

    def decided(self, asked: EngineSettings, bench: Workbench, per_round: int) -> EngineSettings:
        """Decide the engine of each actor; `slots` says whether its clients run side by side (0: one at a time)."""
        on_gpu = bench.device.type == "cuda"
        if asked.gpus and not on_gpu:
            raise InputError(f"engine.gpus = {asked.gpus:g} needs clients that train on a GPU: set device = 'cuda', or engine.gpus = 0")
        gpus = (asked.gpus or 1.0) if on_gpu else 0.0
        actors = asked.actors or (max(1, int(torch.cuda.device_count() / gpus)) if on_gpu else ACTORS_ON_CPU)
        cpus = asked.cpus or max(1, (os.cpu_count() or 1) // actors)
        sparse = asked.kernel == "sparse"
        each = asked.but(name="auto", workers=asked.workers or (1 if sparse else 0))
        inner = choice.decided(each, bench, -(-per_round // actors))
        if not kind(inner.name).side_by_side:
            inner = inner.but(kernel="sparse" if sparse else "auto", slots=0, workers=0)
        return inner.but(name="ray", actors=actors, cpus=cpus, gpus=gpus)

    def make(self, settings: EngineSettings, bench: Workbench, rows: Sequence[Tensor], eval_batch_size: int) -> SerialEngine:
        return SerialEngine(bench, rows, eval_batch_size)

    @contextlib.contextmanager
    def open(self, run: Assembled, folder: Path | None, data_dir: str | Path | None, door: Door | None) -> Iterator[Assembled]:
        experiment = run.experiment
        with spread(experiment.engine, run.bench, run.rows, experiment.eval.batch_size) as engine:
            yield replace(run, plan=replace(run.plan, engine=engine))

    def foreign(self, address: str) -> list[str]:
        return [address] if is_elsewhere(address) else []


@contextlib.contextmanager
def spread(settings: EngineSettings, bench: Workbench, rows: Sequence[Tensor], eval_batch_size: int) -> Iterator[RayEngine]:
    """Yield an engine of actors with these decided settings, and end them afterwards."""
    with connected(settings, _store_bytes(settings, bench, rows)) as ray:
        store = _stored(ray, settings, bench, Holdings.of(rows), eval_batch_size)
        options = {"num_cpus": settings.cpus, "num_gpus": settings.gpus, "max_restarts": -1, "max_task_retries": RETRIES}
        actor = ray.remote(**options)(Actor)
        actors = [actor.remote() for _ in range(settings.actors)]
        try:
            yield RayEngine(ray, actors, store, bench, SerialEngine(bench, rows, eval_batch_size), settings)
        finally:
            for each in actors:
                ray.kill(each)


def is_elsewhere(address: str) -> bool:
    """Whether engine.address names a cluster that may belong to others: its replies are unpickled here."""
    return address not in ("", "local", "auto")


@contextlib.contextmanager
def connected(settings: EngineSettings, store_bytes: int | None = None) -> Iterator[Any]:
    """Connect the module `ray`: to our own Ray on this machine's loopback, to a cluster, or to an existing connection."""
    local = settings.address == "local"
    if is_elsewhere(settings.address):
        permit(settings.address, "Ray cluster")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if local:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # read on import; off, Ray listens on loopback only, on Linux too
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 leaves actors a thirtieth of a core that somebody else wants too
    ray = optional("ray", "ray")
    if ray.is_initialized():
        yield ray
        return
    ours = {"num_cpus": max(1, ceil(settings.actors * settings.cpus)), "include_dashboard": False, "object_store_memory": store_bytes}
    try:
        with _same_handlers():
            ray.init(address=settings.address, log_to_driver=False, logging_level="ERROR", **(ours if local else {}))
        if local and not (address := ray.util.get_node_ip_address()).startswith("127."):
            note(f"Ray was imported before fedrts could tell it to listen on loopback: it listens on {address}")
        yield ray
    except ConnectionError as error:
        raise InputError(
            f"engine.address = '{settings.address}': there is no Ray cluster ({reason(error)}); start one with `ray start`"
        ) from error
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _same_handlers() -> Iterator[None]:
    """Restore the SIGTERM handler that Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class RayEngine:
    """Divide the clients of a round among actors; the server's model is evaluated here."""

    ray: Any
    actors: list[Any]
    store: list[Any]
    """What actors are made from, and made from again: it stays in Ray's store as long as it is named here."""
    bench: Workbench
    serial: SerialEngine
    settings: EngineSettings

    @property
    def label(self) -> str:
        s = self.settings
        each = f"{s.gpus:g} GPU" if s.gpus else f"{s.cpus:g} CPU"
        how = f"{s.slots} {s.kernel} slots" if s.slots else "one client after the other"
        return f"ray engine ({s.actors} actors of {each}, {how})"

    def run(self, order: Order, clients: Sequence[int]) -> Iterator[Reply | Failure]:
        raise NotImplementedError("actors send back sums, not replies: see answer")

    def answer(self, question: Question) -> Tally:
        """Return the tallies of all shares, added in the order of the shares."""
        order, residuals = replace(question.order, held={}, missed={}, residuals={}), question.order.residuals
        packed = self.ray.put(pack(replace(question, order=order, state=replace(question.state))))  # without what is cached
        parts = shares([self.bench.training.samples(question.samples[client]) for client in question.asked], len(self.actors))
        asked = [[question.asked[place] for place in part] for part in parts]
        try:
            told = [{client: residuals[client] for client in some if client in residuals} for some in asked]
            shared = zip(self.actors, asked, told, strict=False)
            found = self.ray.get(
                self._few([actor.add_up.remote(packed, some, self.store, pack(left) if left else None) for actor, some, left in shared])
            )
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, InputError) else error) from None
        except self.ray.exceptions.RayActorError as error:
            raise InputError(
                f"round {question.order.round.index}: a ray actor died {RETRIES + 1} times over its share of the clients "
                f"({reason(error)}): nothing of the round was applied; mend the cause (out of memory?), then resume"
            ) from error
        total = add_up(replace(question, asked=()), ())
        for part in found:
            total.add(unpack(part, self.bench.device))
        return total

    def _few(self, tallies: list[Any]) -> list[Any]:
        """Return references to at most `FAN_IN` tallies; larger numbers are added in groups of neighbours, in place."""
        while len(tallies) > FAN_IN:
            groups = [tallies[start : start + FAN_IN] for start in range(0, len(tallies), FAN_IN)]
            tallies = [self.ray.remote(num_cpus=0)(added).remote(*group) for group in groups]
        return tallies

    def evaluate(self, state: State) -> Metrics:
        return self.serial.evaluate(state)


def shares(steps: Sequence[int], count: int) -> list[list[int]]:
    """Divide `steps` into at most `count` non-empty shares of about equal sums, with ascending places in each."""
    turns = schedule([max(number, 1) for number in steps], count)
    found: dict[int, list[int]] = {}
    for turn in sorted(turns, key=lambda turn: turn.client):
        found.setdefault(turn.slot, []).append(turn.client)
    return [found[slot] for slot in sorted(found)]


class Actor:
    """An actor with its own workbench and engine, built when work arrives; after a death it is built again."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.device = torch.device("cpu")

    def add_up(self, packed: np.ndarray, clients: list[int], store: list[Any], residuals: np.ndarray | None = None) -> np.ndarray:
        """Return the packed tally of one share of a packed question's clients, with what they remember of earlier uploads."""
        engine = self.engine or self._made(*store)
        question: Question = replace(unpack(packed, self.device), asked=clients)
        if residuals is not None:
            question = replace(question, order=replace(question.order, residuals=unpack(residuals, "cpu")))
        return pack(add_up(question, arrivals(engine, question.order, clients)))

    def _made(self, paths: list[str], *references: Any) -> Engine:
        find_modules(paths)
        packed, arrays = optional("ray", "ray").get(list(references))
        blueprint = unpack(packed, "cpu")
        settings: EngineSettings = blueprint["settings"]
        self.device = torch.device("cuda" if settings.gpus else "cpu")
        torch.set_num_threads(max(1, int(settings.cpus)))
        held = {name: trees.mapped(tensor_of, tree) for name, tree in arrays.items()}
        none = (trees.at(held[name], slice(0, 0)) for name in ("x", "y"))
        data = Data(held["x"], held["y"], *none, **blueprint["data"]).to(self.device)
        bench = Workbench(blueprint["module"].to(self.device), data=data, **blueprint["bench"])
        inner = settings.but(name="batched" if settings.slots else "serial")
        self.engine = choice.make(inner, bench, Holdings(held["rows"], held["bounds"]), blueprint["eval_batch_size"])
        return self.engine


def added(*packed: np.ndarray) -> np.ndarray:
    """Add packed tallies in their order."""
    first, *others = (unpack(one, "cpu") for one in packed)
    for other in others:
        first.add(other)
    return pack(first)


def pack(value: object) -> np.ndarray:
    """Pack anything with tensors in it into bytes, which Ray passes on without copying."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=optional("ray.cloudpickle", "ray"))
    return np.frombuffer(buffer.getbuffer(), dtype=np.uint8)


def unpack(packed: np.ndarray, device: torch.device | str) -> Any:
    """Unpack what a process of the same run packed, with its tensors on `device`."""
    return torch.load(io.BytesIO(packed.data), map_location=device, weights_only=False)


def find_modules(paths: list[str]) -> None:
    """Make a process that Ray started find modules where the first process does."""
    sys.path += [path for path in paths if path not in sys.path]


def tensor_of(array: np.ndarray) -> Tensor:
    """Return a read-only tensor over memory that all actors of a machine share."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _stored(ray: Any, settings: EngineSettings, bench: Workbench, rows: Holdings, eval_batch_size: int) -> list[Any]:
    """Store what every actor is built from: module paths, and references to a packed blueprint and to the training data."""
    data = bench.data
    blueprint = {
        "settings": settings,
        "module": bench.module,
        "data": {"classes": data.classes, "task": data.task, "view": data.view and data.view.to("cpu")},
        "bench": {name: getattr(bench, name) for name in ("layout", "training", "seed", "macs", "protection", "summing", "noise")},
        "eval_batch_size": eval_batch_size,
    }
    if data.apart is not None:
        raise InputError(f"ray's actors take tensors, and {data.apart}: use --engine serial")
    parts = {"x": data.x, "y": data.y, "rows": rows.rows, "bounds": rows.bounds}
    arrays = {name: trees.mapped(lambda leaf: leaf.cpu().numpy(), tree) for name, tree in parts.items()}
    try:
        return [list(sys.path), ray.put(pack(blueprint)), ray.put(arrays)]
    except (TypeError, AttributeError, RuntimeError) as error:
        raise InputError(f"this model or task cannot be sent to ray's actors ({reason(error)}): use --engine batched") from error


def _store_bytes(settings: EngineSettings, bench: Workbench, rows: Sequence[Tensor]) -> int:
    """Return the bytes that this machine's object store must hold."""
    held = Holdings.of(rows)
    data = sum(tensor.nbytes for tensor in (*trees.leaves(bench.data.x), *trees.leaves(bench.data.y), held.rows, held.bounds))
    return int(1.1 * data) + 64 * bench.layout.length * (settings.actors + 2) + _SPARE_STORE
