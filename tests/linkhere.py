"""Nodes in this process: the messages of a federation, without a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from federating import trusting
from fedrts import config
from fedrts.audit.witness import Witness
from fedrts.flower import HELLO, engine, fleet, messages
from fedrts.flower.deployment import _in_secret, introduction
from fedrts.flower.engine import FlowerEngine
from fedrts.flower.fleet import Fleet
from fedrts.flower.inside import (
    NodeInfo,
    ObjectUnavailableError,
    TaskIdentity,
    get_all_nested_objects,
    get_object_tree,
    message_to_proto,
    named,
    remove_content_from_message,
)
from fedrts.flower.node import Worker
from fedrts.flower.roster import Roster
from fedrts.flower.state import Records
from fedrts.runs.build import Assembled, assemble
from fedrts.secure.identity import public_key
from fedrts.server.client_records import ClientRecords
from fedrts.server.rounds import play

Manners = Callable[[Message, Worker], Message | None]
"""What a node does with a message."""


def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fleet and engine look again at once, and messages can be made."""
    monkeypatch.setattr(fleet, "_LOOK", 0.0)
    monkeypatch.setattr(engine, "_POLL", 0.0)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


@dataclass
class LinkHere:
    """A link to workers in this process."""

    workers: dict[int, Worker] = field(default_factory=dict)
    records: dict[int, Records] = field(default_factory=dict)
    private_keys: dict[int, ec.EllipticCurvePrivateKey] = field(default_factory=dict)
    manners: dict[int, Manners] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    waiting: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    pieces: dict[str, bytes] = field(default_factory=dict)
    down: int = 0
    said: list[str] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)
    slow: bool = False
    """Every piece of a reply comes later than its head."""
    asked_for: set[str] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    """Nodes that a message cannot be sent to."""

    def start(self, node: int, clients: list[int], manners: Manners | None = None) -> None:
        """A node begins, or begins anew."""
        records = self.records.setdefault(node, Records())  # which outlast the process
        self.private_keys.setdefault(node, ec.generate_private_key(ec.SECP256R1()))
        self.workers[node] = Worker(trusting(clients=clients), self.said.append, records=records, key=self.private_keys[node])
        self.starts[node] = self.starts.get(node, 0) + 1
        if manners:
            self.manners[node] = manners

    def nodes(self) -> dict[int, NodeInfo]:
        return {
            n: NodeInfo(node_id=n, public_key=public_key(self.private_keys[n]), last_activated_at=str(self.starts[n])) for n in self.workers
        }

    def push(self, message: Message) -> str | None:
        name, node = message.object_id, message.metadata.dst_node_id
        if node in self.unknown:
            return None
        named(message, name)
        if message.metadata.message_type != HELLO:
            self.down += sum(map(len, messages.opened(message)[1].values()))
        answer = self.manners.get(node, lambda message, worker: worker.reply(message))(message, self.workers[node])
        if answer is not None:
            self.answer(message, answer)
        return name

    def answer(self, message: Message, answer: Message) -> None:
        """A node's answer has come."""
        named(answer, answer.object_id)
        self.pieces |= {key: part.deflate() for key, part in get_all_nested_objects(answer).items()}
        head = remove_content_from_message(answer) if answer.has_content() else answer
        self.waiting[message.metadata.message_id] = (message_to_proto(head), get_object_tree(answer))

    def replies(self, names: list[str]) -> list[tuple[Any, Any]]:
        assert not self.answered & set(names), "a message that was answered is known no more"
        self.answered |= (here := {name for name in names if name in self.waiting})
        return [self.waiting.pop(name) for name in here]

    def piece(self, name: str) -> bytes:
        if self.slow and name not in self.asked_for:
            self.asked_for.add(name)
            raise ObjectUnavailableError(name)
        return self.pieces[name]

    def done_with(self, name: str) -> None: ...


def experiment(method: str = "fedrts", **keywords: Any) -> Assembled:
    """A small run whose clients are on nodes."""
    base = {
        "method": method,
        "model": "mlp",
        "data": "toy_images",
        "model_options": {"hidden": [12, 10]},
        "rounds": 4,
        "clients": {"total": 5, "per_round": 3, "partition": "iid", "min_size": 1},
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.1},
        "topology": {"interval": 2, "end": 4},
        "engine": {"name": "flower", "timeout": 5, "wait": 0.2},
    }
    if "model" in keywords:
        del base["model_options"]
    if method not in ("fedpaq", "fedavg", "fedtopk"):
        base["density"] = 0.5
    return assemble(config.resolve(base, config.from_keywords(keywords)))


def connected(run: Assembled, link: LinkHere, witness: Witness | None = None, **changes: Any) -> Assembled:
    """The run with an engine that talks over the link."""
    known = (Roster(5), run.plan.samples, run.data.fingerprint)
    people = Fleet(link, introduction(run), *known, None, link.said.append, witness)  # type: ignore[arg-type]
    people.look()
    people.look()
    flower = FlowerEngine(
        people,
        run.bench,
        run.plan.samples,
        run.plan.engine,
        lambda departed: 1,
        **{"timeout": 5.0, "deadline": 60.0, "wait": 0.2, **changes},
    )
    return replace(run, plan=replace(run.plan, engine=flower))


def in_secret(run: Assembled, link: LinkHere, folder: Path | None = None, **changes: Any) -> Assembled:
    """The same with an engine that learns sums alone."""
    ready = connected(run, link, **changes)
    engine = ready.plan.engine
    assert isinstance(engine, FlowerEngine)
    return replace(ready, plan=replace(ready.plan, engine=_in_secret(engine, run, folder)))


def two_nodes() -> LinkHere:
    """Nodes 7 and 8, with clients 0, 2, 4 and 1, 3."""
    link = LinkHere()
    link.start(7, [0, 2, 4])
    link.start(8, [1, 3])
    return link


def played(run: Assembled) -> tuple[list[dict[str, Any]], Any]:
    """The lines of history of the whole run, without times, and the last state."""
    state, lines = run.method.begin(run.setup), []
    for step in play(run.plan, state, -1, ClientRecords.of(run.plan.guard)):
        state = step.state
        lines.append({**step.record.as_dict(), "seconds": 0})
    return lines, state


def answering(blobs: dict[str, bytes], facts: dict[str, Any] | None = None) -> Manners:
    """A node that introduces itself and then answers every order with this."""

    def answer(message: Message, worker: Worker) -> Message:
        if message.metadata.message_type == HELLO:
            return worker.reply(message)
        arrays = ArrayRecord({name: Array("uint8", (len(data),), "x", data) for name, data in blobs.items()})
        return Message(RecordDict({"facts": ConfigRecord(facts or {}), "blobs": arrays}), reply_to=message)

    return answer
