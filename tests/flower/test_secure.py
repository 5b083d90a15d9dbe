"""Secure sums over Flower's messages, with nodes in this process: the serial engine's bits, whoever is lost, and one opening a round."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from federating import trusting
from fedrts.client import envelope
from fedrts.client.order import Order, fingerprint
from fedrts.drain import Drain, Drained
from fedrts.errors import InputError
from fedrts.files import write_privately
from fedrts.flower import WORK
from fedrts.flower.confidant import bound, judged
from fedrts.flower.consent import described
from fedrts.flower.deployment import introduction
from fedrts.flower.messages import SUM, content, opened
from fedrts.flower.node import Server, Worker, _stand_by
from fedrts.flower.openings import Opened, Openings
from fedrts.flower.secret import SumStep
from fedrts.flower.site import Site
from fedrts.flower.state import Records
from fedrts.runs.build import Assembled
from fedrts.secure.call import METRICS, Call, Invited, joined
from fedrts.secure.errors import SecureError
from fedrts.secure.identity import public_key
from fedrts.secure.opener import Opener
from fedrts.secure.participant import STEPS, Participant
from fedrts.server.rounds import TooFewError, play
from fedrts.sparse.mask import Mask
from helping import order_of
from linkhere import LinkHere, Manners, experiment, in_secret, nobody_waits, played

NODES = {6: [0], 7: [1], 8: [2], 9: [3], 10: [4]}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_waits(monkeypatch)


def secretly(method: str = "fedrts", **keywords: Any) -> Assembled:
    clients = {"total": 5, "per_round": 5, "partition": "quantity", **keywords.pop("clients", {})}
    return experiment(method, secure={"aggregation": True, **keywords.pop("secure", {})}, clients=clients, **keywords)


def five_nodes(**manners: Manners) -> LinkHere:
    link = LinkHere()
    for node, clients in NODES.items():
        link.start(node, clients, manners.get(f"n{node}"))
    return link


def step_of(message: Message) -> str | None:
    return opened(message)[0].get(SUM) if message.metadata.message_type == WORK else None


def silent_from(step: str, round: int) -> Manners:
    """A node that is lost at this step of this round, and is back for the next one."""
    gone = {"now": False}

    def answer(message: Message, worker: Worker) -> Message | None:
        facts = opened(message)[0] if message.metadata.message_type == WORK else {}
        if facts.get("round") == round and facts.get(SUM) == step:
            gone["now"] = True
        elif facts.get("round") != round:
            gone["now"] = False
        return None if gone["now"] else worker.reply(message)

    return answer


def states(run: Assembled) -> list[torch.Tensor]:
    return [step.state.values for step in play(run.plan, run.method.begin(run.setup), 0)]


@pytest.mark.parametrize(
    ("method", "keywords"),
    [
        ("fedrts", {}),
        ("fedrts", {"wire": {"value_type": "int8"}}),
        ("fedpaq", {}),
        ("fedcucb", {"secure": {"votes_among": 0.5, "bits": 12}}),
        ("fedrts", {"train": {"server_optimizer": "momentum"}, "clients": {"dropout": 0.1}}),
        ("fedavg", {"model": "cnn", "model_options": {"width": 4}}),
    ],
)
def test_sums_over_nodes_have_the_bits_of_the_serial_engine(method: str, keywords: dict[str, Any]):
    run, link = secretly(method, **keywords), five_nodes()
    lines, state = played(in_secret(run, link))
    expected, reference = played(run)
    assert [line["clients"] for line in lines] == [line["clients"] for line in expected]
    assert torch.equal(state.values, reference.values)
    assert state.mask == reference.mask
    assert {name: tensor.tolist() for name, tensor in state.memory.items()} == {
        name: tensor.tolist() for name, tensor in reference.memory.items()
    }


@pytest.mark.parametrize("step", STEPS)
def test_a_node_lost_at_any_step_costs_its_own_words_at_most(step: str, monkeypatch: pytest.MonkeyPatch):
    """As in the serial engine without that client's reply in that round; where its words had come, with it."""
    run = secretly()
    link = five_nodes(n8=silent_from(step, 1))
    ready = in_secret(run, link, timeout=0.3)
    lines, state = played(ready)
    counted = step in ("endorse", "reveal")
    assert [2 in line["clients"] for line in lines] == [True, counted, True, True]
    if not counted:
        assert lines[1]["rejected"] == [{"client": 2, "reason": "late"}]
    serial = run.plan.engine
    work = serial.run

    def without(order: Any, clients: Any) -> Any:
        return work(order, [client for client in clients if counted or client != 2 or order.round.index != 1])

    monkeypatch.setattr(serial, "run", without)
    assert torch.equal(played(run)[1].values, state.values)


def test_too_few_survivors_are_no_round_and_nobody_reveals_anything():
    run = secretly(guard={"attempts": 2})
    link = five_nodes(n8=silent_from("endorse", 1), n9=silent_from("endorse", 1))
    with pytest.raises(TooFewError, match="fewer than 4 usable replies"):
        played(in_secret(run, link, timeout=0.3))
    assert any("3 signatures on the list of survivors where 4 are needed" in line for line in link.said)
    assert all(records.opened(digest_of(link), client) == 0 for node, records in link.records.items() for client in NODES[node])


def digest_of(link: LinkHere) -> str:
    site = link.workers[6].site
    assert site is not None
    return site.digest


def test_a_node_says_nothing_in_the_open():
    run, link = secretly(), five_nodes()
    ready = in_secret(run, link)
    state = run.method.begin(run.setup)
    worker = link.workers[6]
    for facts in ({}, {SUM: "tell"}, {SUM: ""}):
        reply = opened(worker.reply(Message(content({**facts, "round": 0}, {0: b"anything"}), 6, WORK)))
        assert reply[1] == {}
        assert "nothing leaves this site in the open" in reply[0]["reasons"][0]
    plain = ready.plan.engine.run
    (exchange,) = run.plan.exchanges(run.plan.round(0, state.mask))
    replies = list(plain(order_of(run, exchange, state, 0), [0, 1, 2]))
    assert all("in the open" in reply.reason for reply in replies)  # type: ignore[union-attr]


class StoppedError(Exception):
    """The server was killed."""


def stopping(monkeypatch: pytest.MonkeyPatch, where: str, round: int) -> Callable[[], None]:
    """The server is killed in a round: before anybody reveals, after some have, after all have, or after the sum is kept."""
    keep, begin, take = Openings.keep, Openings.begin, Opener.revealed
    armed = {"on": True}

    def kept(self: Openings, found: Any) -> None:
        if armed["on"] and where == "before it is kept" and found.round == round:
            raise StoppedError
        keep(self, found)
        if armed["on"] and where == "after it is kept" and found.round == round:
            raise StoppedError

    def began(self: Openings, index: int, data: bytes, purpose: bytes) -> None:
        if armed["on"] and where == "before shares are asked for" and index == round:
            raise StoppedError
        begin(self, index, data, purpose)

    def revealed(self: Any, client: int, data: bytes) -> None:
        if armed["on"] and where == "while shares come" and self.call.round == round and len(self._revealed) == 2:
            raise StoppedError
        take(self, client, data)

    monkeypatch.setattr(Openings, "keep", kept)
    monkeypatch.setattr(Openings, "begin", began)
    monkeypatch.setattr(Opener, "revealed", revealed)
    return lambda: armed.update(on=False)


@pytest.mark.parametrize("where", ["before shares are asked for", "while shares come", "before it is kept", "after it is kept"])
def test_a_server_that_is_killed_goes_on_to_the_same_bits(where: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    run, link = secretly(), five_nodes()
    disarm = stopping(monkeypatch, where, 2)
    done = [run.method.begin(run.setup)]
    with pytest.raises(StoppedError):
        done.extend(step.state for step in play(in_secret(run, link, tmp_path).plan, done[0], 0))
    disarm()
    revealed = {client: link.records[node].opened(digest_of(link), client) for node, (client,) in NODES.items()}
    if where != "before shares are asked for":
        assert 2 in revealed.values()
    again = in_secret(run, link, tmp_path)
    after = [step.state for step in play(again.plan, done[2], 2)][-1]
    assert torch.equal(after.values, played(run)[1].values)


def test_a_server_that_goes_back_further_reads_what_was_opened(tmp_path):
    """Its last checkpoint is two rounds behind: the nodes would not open these again, and need not."""
    run, link = secretly(), five_nodes()
    first = [step.state for step in play(in_secret(run, link, tmp_path).plan, run.method.begin(run.setup), 0)]
    asked: list[str | None] = []
    for node in NODES:
        link.manners[node] = lambda message, worker: asked.append(step_of(message)) or worker.reply(message)  # type: ignore[func-returns-value]
    second = [step.state for step in play(in_secret(run, link, tmp_path).plan, first[1], 2)]
    assert torch.equal(second[-1].values, first[-1].values)
    assert {step for step in asked if step} == set()


@pytest.mark.parametrize("on_disk", [True, False])
def test_only_rounds_that_may_be_played_again_are_kept(on_disk: bool, tmp_path):
    """Attempts at metrics that came to no sum, and their begun opening, are left until then."""
    openings = Openings(tmp_path if on_disk else None, lambda: 2)
    for index in range(2):
        openings.next_attempt(index, METRICS)
        openings.begin(index, b"shares to come", METRICS)
    openings.next_attempt(2, METRICS)
    for index in range(4):
        openings.keep(Opened(index, "model", "form", (0, 1, 2), 3, 9, np.arange(4, dtype=np.uint32)))
    assert [openings.opened(index, "model") is not None for index in range(4)] == [False, False, True, True]
    assert [openings.begun(index, METRICS) for index in range(2)] == [None, None]
    assert [openings.next_attempt(index, METRICS) for index in range(3)] == [0, 0, 1]


def test_a_round_is_opened_once_whatever_the_server_says(tmp_path):
    """Without its record of sums a server asks again, and no node that has revealed takes part."""
    run, link = secretly(guard={"attempts": 2}), five_nodes()
    list(play(in_secret(run, link, tmp_path).plan, run.method.begin(run.setup), 0))
    for node in NODES:
        link.start(node, NODES[node])  # in new processes, with the records of before
    with pytest.raises(TooFewError, match="has helped to open round 3: no round is opened twice"):
        list(play(in_secret(run, link).plan, run.method.begin(run.setup), 0))


def test_an_opening_in_which_too_few_revealed_is_gone_on_with_once_the_others_are_back():
    """Meanwhile nobody is called anew: two cannot open the round, and a new call would have them forget what opens this one."""
    tries = {8: 0, 9: 0}

    def late(message: Message, worker: Worker) -> Message | None:
        if step_of(message) == "reveal" and opened(message)[0]["round"] == 1:
            (node,) = (node for node, one in link.workers.items() if one is worker)
            tries[node] += 1
            if tries[node] <= 2:
                return None
        return worker.reply(message)

    run, link = secretly(guard={"attempts": 3}), five_nodes(n8=late, n9=late)
    lines, state = played(in_secret(run, link, timeout=0.3))
    assert tries == {8: 3, 9: 3}
    assert [line["clients"] for line in lines] == [[0, 1, 2, 3, 4]] * 4
    assert {"client": 0, "reason": "it has helped to open round 1, and helps with no other opening of it"} in lines[1]["rejected"]
    assert torch.equal(state.values, played(run)[1].values)


def test_an_opening_that_nobody_can_go_on_with_makes_room_for_another():
    """All but one have lost their keys after that one revealed: the others, who are enough, sum without it."""
    link = LinkHere()

    def restarts(message: Message, worker: Worker) -> Message | None:
        if step_of(message) == "reveal" and opened(message)[0]["round"] == 1:
            (node,) = (node for node, one in link.workers.items() if one is worker)
            if link.starts[node] == 1:
                link.start(node, NODES[node])
                return None
        return worker.reply(message)

    run = secretly(guard={"attempts": 3})
    for node, clients in NODES.items():
        link.start(node, clients, restarts if node != 6 else None)
    lines, _ = played(in_secret(run, link, timeout=1.0))
    assert [line["clients"] for line in lines] == [[0, 1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_a_node_that_cannot_write_down_an_opening_reveals_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """What stands on disk when a share leaves names the round; where the disk is full, no share leaves."""
    link = LinkHere()
    for node in NODES:
        link.records[node] = Records.of(tmp_path / str(node))
    for node, clients in NODES.items():
        link.start(node, clients)
    standing: list[int] = []
    reveal, write = Participant.reveal, write_privately

    def revealing(self: Participant, message: bytes) -> bytes:
        said = reveal(self, message)
        there = json.loads((tmp_path / str(6 + self.client) / "openings.json").read_text())["opened"]
        standing.append(there[digest_of(link)][str(self.client)] - self.call.round)
        return said

    def full(path: Path, data: bytes) -> None:
        if path.name == "openings.json" and path.parent.name == "8":
            raise InputError("cannot write openings.json: no space left")
        write(path, data)

    monkeypatch.setattr(Participant, "reveal", revealing)
    monkeypatch.setattr("fedrts.flower.state.write_privately", full)
    take, revealed = Opener.revealed, []

    def taken(self: Opener, client: int, data: bytes) -> None:
        revealed.append(client)
        take(self, client, data)

    monkeypatch.setattr(Opener, "revealed", taken)
    run = secretly(rounds=1, topology={"interval": 1, "end": 1})
    lines, _ = played(in_secret(run, link))
    assert lines[0]["clients"] == [0, 1, 2, 3, 4]  # its words had come, and four are enough to open
    assert revealed == [0, 1, 3, 4]
    assert standing == [0, 0, 0, 0]
    for records in link.records.values():
        records.close()


def test_a_sum_of_another_model_is_not_taken(tmp_path):
    run, link = secretly(), five_nodes()
    list(play(in_secret(run, link, tmp_path).plan, run.method.begin(run.setup), 0))
    state = run.method.begin(run.setup)
    other = state.with_values(state.values + 1)
    assert fingerprint(other.values) != fingerprint(state.values)
    with pytest.raises(InputError, match=r"the opened sum of round 0 .* is of another model"):
        list(play(in_secret(run, link, tmp_path).plan, other, 0))


def calling(link: LinkHere, study: Assembled, **changes: Any) -> Call:
    """A call for round 0, as the server makes it."""
    roster = tuple(
        Invited(clients[0], study.plan.samples[clients[0]], public_key(link.private_keys[node])) for node, clients in NODES.items()
    )
    given = {"run": bytes.fromhex(digest_of(link)), "round": 0, "attempt": 0, "threshold": 4, "roster": roster}
    return Call(**{**given, "most_samples": max(study.plan.samples), **changes})


def test_calls_that_a_node_refuses_and_why():
    run, link = secretly(), five_nodes()
    in_secret(run, link)
    site = link.workers[6].site
    assert site is not None
    assert site.confidant is not None
    confidant = site.confidant

    def refused(call: Call, why: str) -> None:
        with pytest.raises(SecureError, match=why):
            confidant.answer("advertise", 0, call.encoded)

    refused(calling(link, run, run=b"x" * 32), "another experiment")
    refused(calling(link, run, threshold=3), "a threshold of 3 where the experiment has 4")
    samples = [Invited(one.client, one.samples + (one.client == 0), one.key) for one in calling(link, run).roster]
    refused(calling(link, run, roster=tuple(samples), most_samples=999), "samples of client 0, which has")
    keys = [Invited(one.client, one.samples, calling(link, run).roster[1].key) for one in calling(link, run).roster]
    refused(calling(link, run, roster=tuple(keys)), "another key for client 0")
    confidant.answer("advertise", 0, calling(link, run, attempt=1).encoded)
    refused(calling(link, run, attempt=1), "round 0, attempt 1 was called before")
    refused(calling(link, run, attempt=0), "round 0, attempt 0 was called before")
    site.records.open(site.digest, 0, 3)
    refused(calling(link, run, attempt=2), "has helped to open round 3")
    refused(calling(link, run, round=3, attempt=2), "has helped to open round 3")
    confidant.answer("advertise", 0, calling(link, run, round=4).encoded)


def test_a_node_whose_owner_names_its_peers_sums_with_these_alone():
    run, link = secretly(), five_nodes()
    in_secret(run, link)
    site = link.workers[6].site
    assert site is not None
    assert site.confidant is not None
    site.confidant.pinned = [public_key(link.private_keys[node]) for node in (7, 8, 9)]
    with pytest.raises(SecureError, match="the key of client 4 is none of the peers' in --peers"):
        site.confidant.answer("advertise", 0, calling(link, run).encoded)
    site.confidant.pinned = [public_key(link.private_keys[node]) for node in NODES]
    site.confidant.answer("advertise", 0, calling(link, run).encoded)


def test_a_lying_node_is_left_out_and_blamed():
    def garbled(message: Message, worker: Worker) -> Message:
        if step_of(message) == "mask" and opened(message)[0]["round"] == 1:
            facts, blobs = opened(worker.reply(message))
            return Message(content(facts, {client: data[:-5] for client, data in blobs.items()}), reply_to=message)
        return worker.reply(message)

    run, link = secretly(), five_nodes(n8=garbled)
    lines, _ = played(in_secret(run, link))
    assert lines[1]["clients"] == [0, 1, 3, 4]
    assert lines[1]["rejected"][0]["client"] == 2
    assert "a message that ends too soon" in lines[1]["rejected"][0]["reason"]


def test_a_node_that_was_started_anew_in_the_middle_is_left_out():
    link = LinkHere()

    def restarts(message: Message, worker: Worker) -> Message | None:
        if step_of(message) == "mask" and opened(message)[0]["round"] == 1 and link.starts[8] == 1:
            link.start(8, [2])
            return None
        return worker.reply(message)

    run = secretly()
    for node, clients in NODES.items():
        link.start(node, clients, restarts if node == 8 else None)
    lines, _ = played(in_secret(run, link, timeout=1.0))
    assert [line["clients"] for line in lines] == [[0, 1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert "started anew" in lines[1]["rejected"][0]["reason"]


def test_what_the_server_gets_of_a_client_is_counted():
    run, link = secretly("fedavg"), five_nodes()
    lines, _ = played(in_secret(run, link))
    serial, _ = played(run)
    for over, here in zip(lines, serial, strict=True):
        more = (over["upload_bytes"] - here["upload_bytes"]) / 5
        assert 0 < more < 300 + 5 * 300


def test_a_node_may_stand_for_several_clients():
    run, link = secretly(), LinkHere()
    link.start(7, [0, 2, 4])
    link.start(8, [1, 3])
    assert torch.equal(played(in_secret(run, link))[1].values, played(run)[1].values)


def test_an_owner_is_told_what_the_server_learns():
    run, link = secretly(), five_nodes()
    in_secret(run, link)
    site = link.workers[6].site
    assert site is not None
    shown = described(site, site.digest)
    assert "masked: the server learns sums over 4 clients or more, not this site's part" in shown
    assert "peers that the server names, see --peers" in shown


def test_a_node_is_needed_from_its_words_to_its_shares():
    """Asked to stop in between it stays, or too few may be left to open what is in the sum already."""
    needed: list[tuple[str | None, bool]] = []

    def looked(message: Message, worker: Worker) -> Message:
        reply = worker.reply(message)
        if message.metadata.message_type == WORK:
            needed.append((step_of(message), worker.is_needed))
        return reply

    run, link = secretly(rounds=1, topology={"interval": 1, "end": 1}), five_nodes(n8=looked)
    played(in_secret(run, link))
    assert needed == [("advertise", False), ("share", False), ("mask", True), ("endorse", True), ("reveal", False)]


@pytest.mark.parametrize(("needed", "answered"), [((True, True, False), 3), ((False, False, False), 1)])
def test_a_node_that_is_asked_to_stop_stays_as_long_as_it_is_needed(
    needed: tuple[bool, ...], answered: int, monkeypatch: pytest.MonkeyPatch
):
    drain, steps = Drain(60), iter(needed)
    worker = Mock(drain=drain, parting=None, is_needed=False)

    def handle(reply: object) -> bool:
        drain.begin()
        worker.is_needed = next(steps)
        if worker.reply.call_count == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        worker.reply()
        return True

    connection = MagicMock()
    connection.return_value.__enter__.return_value.handle = handle
    monkeypatch.setattr("fedrts.flower.node.Connection", connection)
    with pytest.raises(Drained), drain.listening():
        _stand_by(worker, Server("here", insecure=True), Mock(), True, 1.0, 60.0)
    assert worker.reply.call_count == answered


def test_a_process_for_every_message_cannot_sum():
    """Flower's own SuperNode: its worker has no key, and would forget the masks."""
    run = secretly()
    worker = Worker(trusting(clients=[0]), lambda text: None, records=Records())
    assert "needs `fedrts client`" in worker.meet(introduction(run))["refused"]


def test_a_site_that_names_its_peers_takes_no_experiment_in_the_open():
    key = ec.generate_private_key(ec.SECP256R1())
    worker = Worker(trusting(clients=[0], peers=[]), lambda text: None, records=Records(), key=key)
    assert "does not sum in secret" in worker.meet(introduction(experiment()))["refused"]


def test_an_experiment_in_the_open_says_nothing_of_sums():
    assert "[secure]" not in introduction(experiment())["experiment"]
    assert "aggregation = true" in introduction(secretly())["experiment"]


# -- attacks of an active server ----------------------------------------------------------------------------------------


def test_a_server_that_sends_nodes_different_models_opens_nothing(monkeypatch: pytest.MonkeyPatch):
    """All but the victim get a model that cannot change (all weights 0): the sum of their changes is 0, and the rest is the victim's."""
    run, link = secretly("fedavg", guard={"attempts": 1}), five_nodes()
    ready, state = in_secret(run, link), run.method.begin(run.setup)
    plain = SumStep._blob

    def two_models(self: SumStep, client: int, first: bool = False) -> bytes:
        if not self.with_order or client == 0:
            return plain(self, client, first)
        dead = Order.of(self.order.exchange, self.order.round, run.layout, state.with_values(torch.zeros_like(state.values)), 1)
        return joined([self.messages[client], envelope.encode_order(dead, client, None)])

    monkeypatch.setattr(SumStep, "_blob", two_models)
    with pytest.raises(TooFewError):
        list(play(ready.plan, state, 0))
    assert sum("of another model, mask or normalisation than the sum was called for" in line for line in link.said) == 4
    assert all(records.opened(digest_of(link), client) == -1 for node, records in link.records.items() for client in NODES[node])


def test_a_sum_is_of_one_model_whatever_short_names_say(monkeypatch: pytest.MonkeyPatch):
    """A server that makes two masks finds two with one name of 8 bytes within 2^32 tries: what all sign is a SHA-256 of model and mask."""
    run = secretly()
    state = run.method.begin(run.setup)
    (exchange,) = run.plan.exchanges(run.plan.round(1, state.mask))
    moved = state.mask.bits.clone()
    moved[state.mask.active[0]], moved[state.mask.inactive[0]] = False, True
    masks = (state.mask, Mask(moved, state.mask.sizes))
    monkeypatch.setattr(Mask, "fingerprint", b"the same")
    sent = [order_of(run, exchange, state.with_values(values), 1) for values in (state.values, state.values * 2)]
    orders = [replace(order, frame=replace(order.frame, mask=mask)) for mask in masks for order in sent]
    summing = run.plan.summing
    assert summing is not None
    assert len({summing.form(one, run.method, 5).digest(one) for one in orders}) == 4
    assert len({judged(one) for one in orders}) == 4


def test_a_node_trains_on_no_other_model_than_was_called_for(monkeypatch: pytest.MonkeyPatch):
    """What is wrong with an order shows before any work on it: neither time nor an error of the work tells of the data."""
    run, link = secretly("fedavg", guard={"attempts": 1}), five_nodes()
    ready, state, worked = in_secret(run, link), run.method.begin(run.setup), []
    plain, work = SumStep._blob, Site._carried_out

    def another(self: SumStep, client: int, first: bool = False) -> bytes:
        if not self.with_order or client:
            return plain(self, client, first)
        other = Order.of(self.order.exchange, self.order.round, run.layout, state.with_values(state.values * 2), 1)
        return joined([self.messages[client], envelope.encode_order(other, client, None)])

    def working(self: Site, order: Order, client: int, memory: Any) -> Any:
        worked.append((order.round.index, client))
        return work(self, order, client, memory)

    monkeypatch.setattr(SumStep, "_blob", another)
    monkeypatch.setattr(Site, "_carried_out", working)
    assert played(ready)[0][0]["clients"] == [1, 2, 3, 4]
    assert {client for _, client in worked} == {1, 2, 3, 4}


def test_a_round_is_trained_in_its_own_sum_alone():
    """Opened in the places of two rounds, with other clients, the very same updates of a third would differ by one client's."""
    run, link = secretly("fedavg"), five_nodes()
    in_secret(run, link)
    site, state = link.workers[6].site, run.method.begin(run.setup)
    assert site is not None
    assert site.confidant is not None
    assert run.plan.summing is not None
    (exchange,) = run.plan.exchanges(run.plan.round(2, state.mask))
    order = order_of(run, exchange, state, 2)
    form = bound(run.plan.summing.form(order, run.method, 5).digest(order), [])
    for index, why in ((1, "an order of round 2 in a sum of round 1"), (2, "too early for its masked words")):
        site.confidant.answer("advertise", 0, calling(link, run, round=index, form=form).encoded)
        told, replies = site.answer({0: joined([b"", envelope.encode_order(order, 0, None)])}, {SUM: "mask"})
        assert replies == {}
        assert why in told["reasons"][0]  # the second order fits, and no shares were dealt


def test_how_a_client_s_own_work_fails_is_not_told():
    run, link = secretly(), five_nodes()
    ready = in_secret(run, link)
    site = link.workers[8].site
    assert site is not None

    def fails(order: Order, client: int, memory: Any) -> Any:
        raise InputError("patient 17 has no weight")

    site._carried_out = fails  # type: ignore[method-assign]
    lines, _ = played(ready)
    assert [line["clients"] for line in lines] == [[0, 1, 3, 4]] * 4
    assert "its work failed (InputError)" in lines[0]["rejected"][0]["reason"]
    assert "patient" not in str(lines)


def test_a_server_that_tells_nodes_different_normalisations_gets_no_words():
    """It is a part of the model: a large mean makes the inputs of all but one what no unit responds to."""

    def otherwise(message: Message, worker: Worker) -> Message:
        if step_of(message) == "mask":
            assert worker.site is not None
            worker.site.normalise([0.9, 0.9])
        return worker.reply(message)

    run, link = secretly(), five_nodes(n8=otherwise)
    lines, _ = played(in_secret(run, link))
    assert all(line["clients"] == [0, 1, 3, 4] for line in lines)
    assert "normalisation than the sum was called for" in lines[0]["rejected"][0]["reason"] or any(
        "normalisation than the sum was called for" in line for line in link.said
    )


def overflowing(link: LinkHere, nodes: Iterable[int], round: int) -> None:
    """The updates of these nodes are not finite in a round."""
    for node in nodes:
        site = link.workers[node].site
        assert site is not None

        def work(order: Any, client: int, memory: Any, work: Callable[..., Any] = site._carried_out) -> Any:
            reply = work(order, client, memory)
            if order.round.index == round:
                reply.message["weights"][3] = torch.inf
            return reply

        site._carried_out = work  # type: ignore[method-assign]


def test_a_client_whose_update_overflows_is_not_told_from_others(monkeypatch: pytest.MonkeyPatch):
    """Or a model that overflows on some rows asks each client, without any opening, whether it has such rows."""
    run, link = secretly(), five_nodes()
    ready = in_secret(run, link)
    overflowing(link, [8], 1)
    with pytest.warns(UserWarning, match="round 1: 1 of 5 updates were not finite and count as no change"):
        lines, state = played(ready)
    assert [line["clients"] for line in lines] == [[0, 1, 2, 3, 4]] * 4
    assert lines[1]["rejected"] == []
    serial = run.plan.engine
    work = serial.run

    def overflows(order: Any, clients: Any) -> Any:
        for reply in work(order, clients):
            if (reply.client, order.round.index) == (2, 1):
                reply.message["weights"][3] = torch.inf  # type: ignore[union-attr,index]
            yield reply

    monkeypatch.setattr(serial, "run", overflows)
    with pytest.warns(UserWarning, match="1 of 5 updates were not finite"):
        assert torch.equal(played(run)[1].values, state.values)


def test_a_round_without_a_finite_update_is_an_error():
    run, link = secretly(), five_nodes()
    ready = in_secret(run, link)
    overflowing(link, NODES, 2)
    with pytest.warns(UserWarning, match="not finite"), pytest.raises(InputError, match="round 2: no client's update is finite"):
        played(ready)


def test_a_node_with_a_part_of_the_data_sums_updates_alone():
    run, link = secretly(), five_nodes()
    in_secret(run, link)
    site = link.workers[6].site
    assert site is not None
    assert site.confidant is not None
    with pytest.raises(SecureError, match="takes no part in sums of metrics"):
        site.confidant.answer("advertise", 0, calling(link, run, purpose=METRICS).encoded)
    roster = (*calling(link, run).roster, Invited(9, 1, b"key"))
    with pytest.raises(SecureError, match="a sum of 6 clients where a round has 5"):
        site.confidant.answer("advertise", 0, calling(link, run, roster=roster, threshold=5).encoded)


def test_a_node_that_names_its_peers_wants_a_key_for_every_client():
    run, link = secretly(), five_nodes()
    in_secret(run, link)
    site = link.workers[6].site
    assert site is not None
    assert site.confidant is not None
    site.confidant.alone = True
    roster = tuple(Invited(one.client, one.samples, calling(link, run).roster[min(one.client, 1)].key) for one in calling(link, run).roster)
    with pytest.raises(SecureError, match="one key for several clients"):
        site.confidant.answer("advertise", 0, calling(link, run, roster=roster).encoded)
