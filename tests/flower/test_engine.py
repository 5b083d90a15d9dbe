"""The engine and the fleet against nodes in this process: the same messages, without a network."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

import torch
from flwr.app import Message

from federating import trusting
from fedrts.client.privacy import Protection, spent
from fedrts.errors import InputError
from fedrts.flower import HELLO, PROTOCOL, messages
from fedrts.flower.deployment import engaged, introduction
from fedrts.flower.engine import FlowerEngine
from fedrts.flower.fleet import Fleet
from fedrts.flower.inside import ObjectUnavailableError, get_all_nested_objects, get_object_tree
from fedrts.flower.link import Address, _await
from fedrts.flower.messages import Incoming
from fedrts.flower.node import Worker
from fedrts.flower.roster import Member, Roster
from fedrts.flower.site import Site, accepted
from fedrts.runs.build import Assembled, with_samples
from fedrts.server.client_records import ClientRecords
from fedrts.server.rounds import play
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind
from fedrts.wire.errors import WireError
from helping import instruction_sets, order_of
from linkhere import LinkHere, Manners, answering, connected, experiment, nobody_waits, played, two_nodes


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_waits(monkeypatch)


@pytest.mark.parametrize(
    ("method", "keywords"),
    [
        ("fedrts", {}),
        ("fedrts", {"wire": {"value_type": "int8"}, "clients": {"dropout": 0.3}}),
        ("feddst", {"wire": {"value_type": "float16"}}),
        ("feddst", {"wire": {"value_type": "int4"}}),
        ("fedrts", {"wire": {"value_type": "int2"}}),
        ("fedrts", {"wire": {"value_type": "int2", "download_type": "int8"}}),
        ("feddst", {"wire": {"value_type": "float32", "download_type": "int4"}}),
        ("fedtiny", {}),
        ("grasp", {}),
        ("prunefl", {"train": {"optimizer": "adam", "server_optimizer": "adam"}}),
        ("fedsgc", {}),
        ("fedpaq", {}),
        ("fedpaq", {"method_options": {"uplink": "int4", "downlink": "int6"}}),
        ("fedrts", {"topology": {"density_start": 0.9}}),
        ("fedsgc", {"topology": {"density_start": 0.9}, "wire": {"value_type": "float16"}}),
        ("fedrts", {"topology": {"unit": "block:2×2"}}),
        ("feddst", {"model": "cnn", "topology": {"unit": "kernel"}}),
    ],
)
def test_every_kind_of_exchange_gives_the_bits_and_bytes_of_the_serial_engine(method: str, keywords: dict[str, Any]):
    run, link = experiment(method, **keywords), two_nodes()
    lines, state = played(connected(run, link))
    expected, reference = played(run)
    assert lines == expected
    assert torch.equal(state.values, reference.values)
    assert state.mask == reference.mask
    dropped = any(entry["reason"] == "dropped out" for line in lines for entry in line["rejected"])
    assert dropped or link.down == sum(line["download_bytes"] for line in lines)


@pytest.mark.parametrize("isa", instruction_sets())
def test_nodes_compute_in_the_kernel_of_the_server(monkeypatch: pytest.MonkeyPatch, isa: str):
    """On every instruction set of this machine, the best or not, with the bits of the serial engine."""
    monkeypatch.setenv("FEDRTS_KERNELS", "1")
    run, link = experiment("fedrts", engine={"kernel": "sparse", "isa": isa}), two_nodes()
    assert run.bench.program is not None
    lines, state = played(connected(run, link))
    expected, reference = played(run)
    assert lines == expected
    assert torch.equal(state.values, reference.values)
    sites = [worker.site for worker in link.workers.values()]
    assert [site.run.bench.program.isa for site in sites if site and site.run.bench.program] == [isa, isa]


def test_replies_whose_pieces_come_late_are_waited_for():
    run, link = experiment(), two_nodes()
    link.slow = True
    ready = connected(run, link)
    while len(ready.plan.engine.fleet.hosts) < 5:  # type: ignore[attr-defined]
        ready.plan.engine.fleet.look()  # type: ignore[attr-defined]
    lines, state = played(ready)
    expected, reference = played(run)
    assert lines == expected
    assert torch.equal(state.values, reference.values)
    assert not [line for line in link.said if line.startswith("refused")]


def test_a_mask_that_was_lost_is_sent_again_and_counted():
    run, link = experiment(), two_nodes()

    def forgetful(message: Message, worker: Worker) -> Message:
        if worker.site is not None:
            worker.site.masks.clear()
        return worker.reply(message)

    link.manners[7] = forgetful
    lines, state = played(connected(run, link))
    expected, reference = played(run)
    assert torch.equal(state.values, reference.values)
    assert [line["rejected"] for line in lines] == [[]] * 4
    assert link.down == sum(line["download_bytes"] for line in lines) > sum(line["download_bytes"] for line in expected)


def test_a_node_that_starts_anew_is_introduced_again_and_misses_nothing():
    run, link = experiment(), two_nodes()
    died: list[int] = []

    def dies(message: Message, worker: Worker) -> Message | None:
        if message.metadata.message_type != HELLO and len(died) < 2:
            died.append(1)
            if len(died) == 1:
                link.start(8, [1, 3])  # it comes back before anybody noticed, and finds the order
                return link.workers[8].reply(message)
            link.start(8, [1, 3])  # it dies with the order
            return None
        return worker.reply(message)

    link.manners[8] = dies
    lines, state = played(connected(run, link))
    expected, reference = played(run)
    assert len(died) == 2
    assert torch.equal(state.values, reference.values)
    assert [line["clients"] for line in lines] == [line["clients"] for line in expected]


def swapped(message: Message, worker: Worker) -> Message:
    """Answers for one client with the reply of another."""
    if message.metadata.message_type == HELLO:
        return worker.reply(message)
    _, orders = messages.opened(message)
    assert worker.site is not None
    facts, replies = worker.site.answer(orders)
    return Message(messages.content(facts, dict(zip(replies, reversed(replies.values()), strict=True))), reply_to=message)


def raising(message: Message, worker: Worker) -> Message:
    if message.metadata.message_type != HELLO:
        worker.host = trusting(clients=[9])
        worker.site = replace(worker.site, host=worker.host) if worker.site else None
    return worker.reply(message)


@pytest.mark.parametrize(
    ("manners", "reason"),
    [
        (answering({}), "its node does not answer for it"),
        (answering({"1": b"nonsense", "3": b"more"}), "too short to be one"),
        (answering({"1": bytes(10**6)}), "bytes, which is the most that was asked for"),
        (answering({}, {"failed": [1, 3], "reasons": ["out of memory", "out of memory"]}), "out of memory"),
        (answering({}, {"missing": [1, 3]}), "its node does not answer for it"),
        (swapped, "its node answers as client"),
        (raising, "is not here"),
        (lambda message, worker: worker.reply(message) if message.metadata.message_type == HELLO else None, "late"),
    ],
)
def test_a_node_with_bad_manners_is_named_with_the_reason_and_the_round_goes_on(manners: Manners, reason: str):
    run, link = experiment(clients={"per_round": 5}, rounds=1, topology={"end": 1}), two_nodes()
    link.manners[8] = manners
    lines, _ = played(connected(run, link, timeout=0.5))
    assert lines[0]["clients"] == [0, 2, 4]
    assert {entry["client"] for entry in lines[0]["rejected"]} == {1, 3}
    assert reason in lines[0]["rejected"][0]["reason"]


def test_who_is_not_there_is_not_reachable_and_not_blamed():
    run, link = experiment(clients={"per_round": 5}), LinkHere()
    link.start(7, [0, 2, 4])
    ledger = ClientRecords.of(run.plan.guard)
    ready = connected(run, link)
    steps = list(play(ready.plan, ready.method.begin(ready.setup), 0, ledger))
    assert all(step.record.rejected == [{"client": client, "reason": "not reachable"} for client in (1, 3)] for step in steps)
    assert not ledger.strikes.counts


def test_a_node_that_goes_at_the_very_moment_is_not_reachable():
    run, link = experiment(clients={"per_round": 5}, rounds=1, topology={"end": 1}), two_nodes()
    ready = connected(run, link)
    link.unknown.add(8)
    lines, _ = played(ready)
    assert lines[0]["rejected"] == [{"client": client, "reason": "not reachable"} for client in (1, 3)]


def test_replies_count_as_they_come_where_more_are_asked_than_needed():
    run, link = experiment(guard={"over_select": 0.5}), two_nodes()
    assert [line["clients"] for line in played(connected(run, link, ordered=False))[0]]


# -- who may stand for whom -------------------------------------------------------------------------------------------


def test_a_client_belongs_to_the_key_that_first_stood_for_it(tmp_path):
    file = tmp_path / "roster.json"
    roster = Roster(2, file)
    assert roster.admit(None, Member(10, "a", "key 1")) == 0
    assert roster.admit(None, Member(20, "b", "key 2")) == 1
    again = Roster(2, file)
    assert again.admit(None, Member(20, "b", "key 2")) == 1
    for client, entry, words in (
        (0, Member(10, "a", "key 2"), "belongs to the node with key"),
        (0, Member(11, "a", "key 1"), "other data than before"),
        (None, Member(5, "c", "key 3"), "none of them"),
    ):
        with pytest.raises(InputError, match=words):
            again.admit(client, entry)
    file.write_text(json.dumps({"0": {"nonsense": 1}}))
    with pytest.raises(InputError, match="is damaged"):
        Roster(2, file)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"clients": [0, 9], "samples": [24, 1], "data": "x"}, "no client 9"),
        ({"clients": [0], "samples": [23], "data": "x"}, "not the experiment's"),
        ({"clients": [0, 0], "samples": [24, 24], "data": "x"}, "which clients"),
        ({"clients": [0]}, "its introduction lacks"),
        ({"clients": [0], "samples": [float("inf")], "data": "x"}, "no list of numbers"),
        ({"clients": [True], "samples": [24], "data": "x"}, "no list of numbers"),
        ({"clients": 0, "samples": [24], "data": "x"}, "no list of numbers"),
        ({"refused": "no data here"}, "no data here"),
        ({"refused": "\x1b[2J" + "a" * 1000}, "it cannot take part:  [2J" + "a" * 200),
    ],
)
def test_what_a_node_says_of_itself_is_checked(facts: dict[str, Any], words: str):
    run, link = experiment(), LinkHere()
    facts = {"protocol": PROTOCOL, **facts, **({"data": run.data.fingerprint} if facts.get("data") else {})}
    link.start(7, [0], lambda message, worker: Message(messages.content(facts), reply_to=message))
    ready = connected(run, link)
    assert isinstance(ready.plan.engine, FlowerEngine)
    assert not ready.plan.engine.fleet.hosts
    assert any(line.startswith("refused: ") and words in line for line in link.said), link.said
    assert all(line.isprintable() and len(line) < 500 for line in link.said)


@pytest.mark.parametrize("claimed", [0, -1, 2**31, 2**45, 2**62])
def test_a_site_cannot_claim_more_samples_than_can_be_counted(claimed: int):
    run, link = experiment(clients={"partition": "sites"}), LinkHere()
    facts = {"protocol": PROTOCOL, "clients": [], "samples": [claimed], "data": "x"}
    link.start(7, [], lambda message, worker: Message(messages.content(facts), reply_to=message))
    people = Fleet(link, introduction(run), Roster(5), None, "", None, link.said.append)  # type: ignore[arg-type]
    people.look()
    people.look()
    assert not people.hosts
    assert any("1 to 2,147,483,647 samples" in line for line in link.said), link.said


def test_samples_that_sites_claim_take_no_memory_here():
    run = with_samples(experiment(clients={"partition": "sites"}), [2**31 - 1] * 5)
    assert list(run.plan.samples) == [2**31 - 1] * 5
    assert run.rows.rows.untyped_storage().nbytes() == 8
    assert [len(rows) for rows in run.rows] == [2**31 - 1] * 5


def test_a_client_that_is_here_already_is_refused_a_second_time():
    run, link = experiment(), two_nodes()
    link.start(9, [3])
    ready = connected(run, link)
    assert isinstance(ready.plan.engine, FlowerEngine)
    assert ready.plan.engine.fleet.hosts == {0: 7, 2: 7, 4: 7, 1: 8, 3: 8}
    assert any("client 3 is already here" in line for line in link.said)


# -- what a site accepts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["model", "method", "data"])
def test_a_site_runs_no_code_that_the_server_names(key: str):
    text = "\n".join(line for line in introduction(experiment())["experiment"].splitlines() if not line.startswith(f"{key} ="))
    with pytest.raises(InputError, match=r"--allow os:system if you trust it|names data"):
        accepted(f'{key} = "os:system"\n{text}', trusting(clients=[0]))


def test_a_site_that_does_not_fit_says_so():
    said = introduction(experiment())
    for changed, host, words in (
        ({"input_shape": [3, 4, 4]}, trusting(clients=[0]), "inputs of shape"),
        ({"classes": 2}, trusting(clients=[0]), "3 classes"),
        ({}, trusting(clients=[17]), "--partition 17"),
        ({}, trusting(), "say with --partition"),
        ({"experiment": "what?"}, trusting(clients=[0]), "no valid TOML"),
    ):
        with pytest.raises(InputError, match=words):
            Site.of(host, {**said, **changed}["experiment"], {**said, **changed})


def test_a_site_stops_when_its_privacy_is_spent():
    run, link = experiment(privacy={"clip": 1.0, "noise": 5.0, "index_epsilon": 1.0}, clients={"per_round": 5}), two_nodes()
    link.workers[8] = Worker(trusting(clients=[1, 3], epsilon=3.5), link.said.append)
    lines, _ = played(connected(run, link))
    assert lines[0]["clients"] == [0, 1, 2, 3, 4]
    assert lines[-1]["clients"] == [0, 2, 4]
    assert "of this site is spent" in lines[-1]["rejected"][0]["reason"]


def answers(worker: Worker, run: Assembled, client: int = 1) -> list[str]:
    """Why a worker does not answer the first order of a run; nothing if it does."""
    said = worker.meet(introduction(run))
    assert "refused" not in said, said
    state = run.method.begin(run.setup)
    index = -1 if run.plan.exchanges(run.plan.round(-1, state.mask)) else 0
    order = order_of(run, run.plan.exchanges(run.plan.round(index, state.mask))[0], state, index)
    header = Header(Kind.DOWNLOAD, bytes.fromhex(run.layout.fingerprint), state.mask.fingerprint, index, 0, client)
    assert worker.site is not None
    facts, replies = worker.site.answer({client: codec.encode(header, order.exchange.down, order.sent, order.frame, None)})
    assert len(replies) + len(facts["reasons"]) == 1
    reasons: list[str] = facts["reasons"]
    return reasons


def test_what_is_spent_stays_spent_in_the_next_experiment():
    worker = Worker(trusting(clients=[1, 3], epsilon=8.0), lambda text: None)
    table = {"clip": 1.0, "noise": 5.0, "index_epsilon": 1.0}
    one = spent(Protection(**table), 1, 1)["total"]
    assert one is not None
    assert 2 < one < 3
    found = [answers(worker, experiment(seed=seed, privacy=table)) for seed in range(6)]
    allowed = next(n for n in range(10) if spent(Protection(**table), n + 1, n + 1)["total"] > 8.0)  # type: ignore[operator]
    assert 2 <= allowed < 6
    assert found[:allowed] == [[]] * allowed
    assert all("the ε = 8 of this site is spent" in reasons[0] for reasons in found[allowed:])


def test_a_site_that_is_one_client_counts_whatever_number_it_is_given():
    table = {"clip": 1.0, "noise": 5.0, "index_epsilon": 1.0}
    run = experiment(privacy=table, clients={"partition": "sites"})
    worker = Worker(trusting(epsilon=3.0), lambda text: None)
    assert [len(answers(worker, run, client)) for client in (0, 0, 1, 2, 1000)] == [0, 1, 1, 1, 1]


def test_a_site_with_a_limit_counts_for_its_own_delta():
    table = {"clip": 1.0, "noise": 0.5, "index_epsilon": 0.1, "delta": 0.9999}
    worker = Worker(trusting(clients=[1, 3], epsilon=1.0), lambda text: None)
    assert "of this site is spent" in answers(worker, experiment(privacy=table))[0]
    assert answers(Worker(trusting(clients=[1, 3], epsilon=40.0, delta=1e-3), lambda text: None), experiment(privacy=table)) == []


@pytest.mark.parametrize("method", ["snip", "feddst", "prunefl"])
def test_a_site_with_a_limit_sends_nothing_unprotected(method: str):
    worker = Worker(trusting(clients=[1, 3], epsilon=100.0), lambda text: None)
    (reason,) = answers(worker, experiment(method))
    assert "there is no protection" in reason
    assert "no bounded ε" in answers(worker, experiment("random"))[0]
    assert answers(Worker(trusting(clients=[1, 3]), lambda text: None), experiment(method)) == []


# -- limits -----------------------------------------------------------------------------------------------------------


def arriving(message: Message, limit: int) -> Incoming:
    return Incoming(message.object_id, get_object_tree(message), limit)


def test_an_array_that_names_one_piece_many_times_is_not_unpacked():
    message = Message(messages.content({}, {1: bytes(2**25)}), 7, HELLO)
    pieces = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
    assert sum(map(len, pieces.values())) < 2**23, "zeros travel as one piece of 5 MiB"
    incoming = arriving(message, 2**23)
    assert incoming.advance(pieces.__getitem__)
    with pytest.raises(WireError, match="more than 8,388,608 bytes"):
        incoming.message()


def test_no_more_is_taken_than_the_limit():
    message = Message(messages.content({}, {1: torch.arange(2**21).numpy().tobytes()}), 7, HELLO)
    pieces = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
    incoming = arriving(message, 2**23)
    with pytest.raises(WireError, match="more than 8,388,608 bytes"):
        incoming.advance(pieces.__getitem__)
    assert sum(map(len, incoming.contents.values())) <= 2**23


def test_a_message_whose_pieces_do_not_come_is_waited_for():
    message = Message(messages.content({"a": 1}, {1: b"xyz"}), 7, HELLO)
    pieces = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}

    def absent(name: str) -> bytes:
        raise ObjectUnavailableError(name)

    incoming = arriving(message, 10_000)
    assert not incoming.advance(absent)
    assert incoming.advance(pieces.__getitem__)
    assert messages.opened(incoming.message()) == ({"a": 1}, {1: b"xyz"})


def test_garbage_in_the_place_of_pieces_is_an_error_of_ours():
    message = Message(messages.content({}, {1: b"xyz"}), 7, HELLO)
    incoming = arriving(message, 10_000)
    assert incoming.advance(lambda name: b"garbage")
    with pytest.raises(WireError, match="cannot be read"):
        incoming.message()


# -- the server's own address -----------------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    """A service that answers everything, with one word."""

    word = b"hello"

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.word)

    def log_message(self, format: str, *args: Any) -> None: ...


@dataclass
class Dying:
    """A process that is seen alive so many times."""

    lives: int

    def poll(self) -> int | None:
        self.lives -= 1
        return 1 if self.lives < 0 else None


def test_another_service_on_the_port_is_not_taken_for_the_superlink():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        address = Address("127.0.0.1", service.server_address[1])
        with pytest.raises(InputError, match="did not start: address in use; choose another --address"):
            _await(Dying(3), address, None, "a word that only ours knows", ["address in use"])
        dying = Dying(3)
        _await(dying, address, None, "hello", [])
        assert dying.lives == 2, "it answers at the first try"
        service.shutdown()


def test_a_run_with_nodes_elsewhere_is_not_resumed_with_nodes_here(tmp_path: Path):
    (tmp_path / "roster.json").write_text("{}")
    with pytest.raises(InputError, match="go on with the `fedrts server` command"), engaged(experiment(), tmp_path, None, None):
        pass
