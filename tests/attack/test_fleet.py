"""Who takes part: refusals are final and said on both sides, numbers belong to keys, nobody trains on alone, and studies end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

import safetensors.torch
import torch
from flwr.app import Error, Message

from federating import trusting
from fedrts import config
from fedrts.cli.deployment import roster as roster_command
from fedrts.errors import InputError, RefusedError
from fedrts.flower import FAREWELL, HELLO, PROTOCOL, WORK, final, fleet, messages, node, people
from fedrts.flower.deployment import _explained, introduction
from fedrts.flower.engine import FlowerEngine, Paces
from fedrts.flower.fleet import Fleet
from fedrts.flower.host import Host
from fedrts.flower.inside import ErrorCode
from fedrts.flower.keys import Authority, issue
from fedrts.flower.node import Parting, Worker, serve
from fedrts.flower.roster import Member, Roster
from fedrts.report.content import absences
from fedrts.report.read import Run
from fedrts.runs.build import Assembled, with_samples
from fedrts.runs.folder import RunFolder
from fedrts.server.client_records import ClientRecords
from fedrts.server.guard import Lateness
from fedrts.server.rounds import play, play_round
from linkhere import LinkHere, answering, connected, experiment, nobody_waits, two_nodes

Answer = Callable[[Message, Worker], Message | None]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_waits(monkeypatch)


def meeting(run: Assembled, link: LinkHere, roster: Roster | None = None, sites: bool = False, authority: Authority | None = None) -> Fleet:
    """A fleet that has looked often enough for everybody to be heard."""
    samples = None if sites else run.plan.samples
    people = Fleet(link, introduction(run), roster or Roster(5), samples, run.data.fingerprint, authority, link.said.append)  # type: ignore[arg-type]
    for _ in range(3):
        people.look()
    return people


def introducing(**facts: Any) -> Answer:
    """A node that says this of itself, and otherwise does as it is told."""

    def answer(message: Message, worker: Worker) -> Message:
        if message.metadata.message_type == HELLO:
            return Message(messages.content({"protocol": PROTOCOL, **facts}), reply_to=message)
        return worker.reply(message)

    return answer


def site(samples: int, data: str) -> Answer:
    return introducing(clients=[], samples=[samples], data=data)


# -- refused ----------------------------------------------------------------------------------------------------------


def test_a_refused_node_is_told_why_and_ends_with_a_code_that_service_managers_know():
    run, link = experiment(), LinkHere()
    link.start(7, [0], introducing(clients=[17], samples=[24], data=run.data.fingerprint))
    meeting(run, link)
    parting = link.workers[7].parting
    assert parting is not None
    with pytest.raises(RefusedError, match="there is no client 17") as caught:
        parting.obey(link.said.append)
    assert caught.value.code == 77


def test_a_refused_node_is_not_asked_again_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet, "_AGAIN", 0.0)
    run, link, asked = experiment(), LinkHere(), []

    def wrong(message: Message, worker: Worker) -> Message | None:
        asked.append(message.metadata.message_type)
        return introducing(clients=[17], samples=[24], data="x")(message, worker)

    link.start(7, [0], wrong)
    people = meeting(run, link)
    for _ in range(30):
        people.look()
    assert asked == [HELLO, FAREWELL]
    assert len([line for line in link.said if line.startswith("refused")]) == 1


def test_what_may_mend_itself_is_tried_again_but_not_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet, "_AGAIN", 0.0)
    run, link = experiment(), two_nodes()
    link.start(9, [3])  # started anew under another name, while its old connection is not yet known to be dead
    people = meeting(run, link, Roster(5, keyed=False))
    assert link.workers[9].parting is None
    del link.workers[8]
    for _ in range(3):
        people.look()
    assert people.hosts[3] == 9
    link.start(10, [3])
    for _ in range(30):
        people.look()
    assert "client 3 is already here" in link.workers[10].parting.text  # type: ignore[union-attr]


def test_a_node_says_that_it_takes_part_only_once_it_does():
    run, link = experiment(), two_nodes()
    link.start(9, [0, 1])  # of which others are here already
    worker = link.workers[9]
    said: list[str] = []
    worker.say = said.append
    meeting(run, link)
    assert worker.site is not None
    assert not said
    assert any("taking part in fedrts on toy_images" in line for line in link.said)


def test_a_node_that_cannot_take_part_goes(monkeypatch: pytest.MonkeyPatch):
    worker = Worker(trusting(clients=[17]), print)
    said = worker.meet(introduction(experiment()))
    assert "refused" in said
    with pytest.raises(RefusedError, match="cannot take part: --partition 17"):
        worker.parting.obey(print)  # type: ignore[union-attr]


class ConnectionHere:
    """A server that sends one message, and is gone before it is answered."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> ConnectionHere:
        return self

    def __exit__(self, *_: object) -> None: ...

    facts: dict[str, str] = {}

    def handle(self, answer: Callable[[Message], Message]) -> bool:
        answer(Message(messages.content(self.facts), 7, FAREWELL))
        raise ConnectionError("the server has closed")


@pytest.mark.parametrize(("why", "code"), [("finished", 0), ("withdrawn", 0), ("refused", 77), ("removed", 77), ("\x1b[2Jwhat?", 77)])
def test_a_farewell_ends_a_node_even_if_the_server_closes_at_once(monkeypatch: pytest.MonkeyPatch, why: str, code: int):
    monkeypatch.setattr(node, "Connection", ConnectionHere)
    monkeypatch.setattr(ConnectionHere, "facts", {"why": why, "text": "so it is\x1b[2J"})
    said: list[str] = []
    try:
        serve(trusting(clients=[0]), node.Server("127.0.0.1:1", insecure=True), said.append)
        ended = 0
    except RefusedError as error:
        ended, said = error.code, [*said, str(error)]
    assert ended == code
    assert "so it is" in said[-1]
    assert said[-1].isprintable()


# -- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", [{}, {"protocol": PROTOCOL + 1, "fedrts": "9.9"}, {"protocol": "\x1b[2J", "fedrts": "\x1b[2J"}])
def test_a_node_of_another_version_is_named_with_both_versions_and_the_remedy(theirs: dict[str, Any]):
    run, link = experiment(), LinkHere()
    facts = {"clients": [0], "samples": [run.plan.samples[0]], "data": run.data.fingerprint, **theirs}
    link.start(7, [0], lambda message, worker: Message(messages.content(facts), reply_to=message))
    assert not meeting(run, link).hosts
    (line,) = [line for line in link.said if line.startswith("refused")]
    assert "install the same fedrts on both" in line
    assert f"(protocol {PROTOCOL})" in line
    assert line.isprintable()


def test_a_server_of_another_version_is_named_with_both_versions_and_the_remedy():
    worker = Worker(trusting(clients=[0]), print)
    old = {key: value for key, value in introduction(experiment()).items() if key not in ("protocol", "fedrts")}
    assert "refused" in worker.meet(old)
    assert worker.parting is not None
    assert "the server runs fedrts of unknown version (protocol none), this node fedrts" in worker.parting.text
    assert "install the same fedrts on both" in worker.parting.text


# -- numbers belong to keys -------------------------------------------------------------------------------------------


class KeyedLink(LinkHere):
    """Nodes with the public keys of an authority."""

    def __init__(self, keys: dict[int, bytes]) -> None:
        super().__init__()
        self.public = keys

    def nodes(self) -> dict[int, Any]:
        found = super().nodes()
        for number, info in found.items():
            info.public_key = self.public[number]
        return found

    def register(self, key: bytes, name: str) -> int:
        return next(number for number, known in self.public.items() if known == key)

    def unregister(self, number: int) -> None: ...


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path / "authority")
    made.init([])
    return made


def registered(authority: Authority, tmp_path: Path, **clients: list[int] | None) -> KeyedLink:
    """Nodes 7, 8, … with keys that were registered in this order, for these clients."""
    for name, numbers in clients.items():
        authority.register(issue(name, tmp_path / "keys")[1], clients=numbers)
    return KeyedLink({7 + place: (tmp_path / "keys" / f"{name}.pub").read_bytes() for place, name in enumerate(clients)})


def test_the_first_node_to_ask_for_all_clients_does_not_get_them(authority: Authority, tmp_path: Path):
    run, link = experiment(), registered(authority, tmp_path, greedy=None, a=[0, 2, 4], b=[1, 3])
    link.start(7, [0, 1, 2, 3, 4])
    people = meeting(run, link, authority=authority)
    assert not people.hosts
    assert not people.roster.entries
    assert any("client 0 is not bound to its key" in line and "--clients 0,1,2,3,4" in line for line in link.said), link.said
    link.start(8, [0, 2, 4])
    link.start(9, [1, 3])
    for _ in range(3):
        people.look()
    assert people.hosts == {0: 8, 2: 8, 4: 8, 1: 9, 3: 9}


def test_a_node_that_asks_for_one_client_too_many_gets_none(authority: Authority, tmp_path: Path):
    run, link = experiment(), registered(authority, tmp_path, a=[0, 1])
    link.start(7, [0, 1, 2])
    people = meeting(run, link, authority=authority)
    assert not people.hosts
    assert not people.roster.entries


def test_a_bound_client_cannot_be_bound_to_another_key(authority: Authority, tmp_path: Path):
    registered(authority, tmp_path, a=[0, 1], b=None)
    with pytest.raises(InputError, match="client 1 is bound to 'a'"):
        authority.register(tmp_path / "keys" / "b.pub", clients=[1, 2])
    authority.register(tmp_path / "keys" / "a.pub", clients=[0])  # again: with others
    authority.register(tmp_path / "keys" / "b.pub", clients=[1, 2])
    assert [seat.clients for seat in authority.seats().values()] == [(0,), (1, 2)]
    authority.revoke("a")
    assert list(authority.seats()) == ["b"]


def test_sites_are_numbered_as_they_were_registered_whoever_comes_first(authority: Authority, tmp_path: Path):
    run = experiment(clients={"partition": "sites", "total": 4, "per_round": 4})
    link = registered(authority, tmp_path, zoo=None, bound=[0], a=None, late=None)
    people = meeting(run, link, Roster(4), sites=True, authority=authority)
    for number in (10, 9, 8, 7):
        link.start(number, [], site(number, f"data {number}"))
        for _ in range(3):
            people.look()
    assert {client: entry.samples for client, entry in sorted(people.roster.entries.items())} == {0: 8, 1: 7, 2: 9, 3: 10}
    assert [people.roster.entries[n].name for n in range(4)] == ["bound", "zoo", "a", "late"]


# -- the roster -------------------------------------------------------------------------------------------------------


def test_a_wrong_client_that_came_first_can_be_put_out_while_the_server_runs(tmp_path: Path):
    run, link = experiment(clients={"partition": "sites", "total": 2, "per_round": 2}), LinkHere()
    link.start(7, [], site(10, "wrong"))
    link.start(8, [], site(20, "b"))
    people_here = meeting(run, link, Roster(2, tmp_path / "roster.json"), sites=True)
    link.start(9, [], site(30, "right"))
    for _ in range(3):
        people_here.look()
    assert link.workers[9].parting is not None  # all sites are known
    Roster(2, tmp_path / "roster.json").leave(0, "removed")  # what `fedrts roster` does
    for _ in range(2):
        people_here.look()
    assert link.workers[7].parting == Parting("removed", "the server says: the coordinator removed this node from the study")
    link.start(9, [], site(30, "right"))
    link.start(7, [], site(10, "wrong"))  # started anew, with the same key
    for _ in range(3):
        people_here.look()
    assert {client: entry.data for client, entry in people_here.roster.entries.items()} == {0: "right", 1: "b"}
    assert people_here.hosts == {0: 9, 1: 8}
    assert any("withdrew or was removed" in line for line in link.said)


def test_once_a_study_has_begun_only_the_same_data_takes_a_free_number(tmp_path: Path):
    roster = Roster(2, tmp_path / "roster.json")
    for number in range(2):
        roster.admit(None, Member(10 + number, f"data {number}", f"key {number}"))
    roster.fixed = True
    roster.leave(1, "removed")
    with pytest.raises(InputError, match="all 2 sites"):
        roster.admit(None, Member(99, "other", "key 2"))
    with pytest.raises(InputError, match="only the same data"):
        roster.admit(1, Member(99, "other", "key 2"))
    assert roster.departed == {1: "removed"}
    assert roster.admit(None, Member(11, "data 1", "key 3")) == 1
    with pytest.raises(InputError, match="withdrew or was removed"):
        roster.admit(None, Member(11, "data 1", "key 1"))
    roster.readmit(1)
    assert not roster.departed


def test_two_who_write_the_roster_do_not_undo_each_other(tmp_path: Path):
    file = tmp_path / "roster.json"
    server, command = Roster(3, file), Roster(3, file)
    server.admit(None, Member(10, "a", "key 1"))
    command.rename(0, "Clinic A")
    server.admit(None, Member(20, "b", "key 2"))
    command.rename(1, "Clinic B")
    assert [entry.name for entry in Roster(3, file).entries.values()] == ["Clinic A", "Clinic B"]

    def half() -> None:
        with server.changing():
            server.admit(None, Member(30, "c", "key 3"))
            server.admit(0, Member(10, "a", "key 9"))

    with pytest.raises(InputError, match="belongs to"):
        half()
    assert sorted(Roster(3, file).entries) == [0, 1]


def test_a_roster_of_before_is_read(tmp_path: Path):
    file = tmp_path / "roster.json"
    file.write_text(json.dumps({"0": {"samples": 10, "data": "a", "key": "key 1"}}))
    assert Roster(2, file).admit(None, Member(10, "a", "key 1")) == 0
    file.write_text("{broken")
    with pytest.raises(InputError, match="is damaged"):
        Roster(2, file)


def test_the_roster_is_shown_with_what_became_of_everybody(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = RunFolder(tmp_path / "run")
    folder.create(config.resolve({"data": "digits", "rounds": 3}))
    roster = Roster(3, folder.path / "roster.json")
    for number in range(3):
        roster.admit(None, Member(10, f"data {number}", f"key {number}", f"site-{number}"))
    roster.note([1], "gone")
    roster.leave(2, "withdrawn")
    line = {"outer": True, "accuracy": None, "links_changed": 0.0, "upload_bytes": 0, "download_bytes": 0, "flops": 0.0, "seconds": 1.0}
    with folder.writing():
        folder.rewind(None)
        folder.append("history.jsonl", {"round": 0, "clients": [0, 1, 2], "rejected": [], **line})
        missing = [{"client": 0, "reason": "late"}, {"client": 2, "reason": "withdrawn"}]
        folder.append("history.jsonl", {"round": 1, "clients": [1], "rejected": missing, **line})
        states = [row["state"] for row in people.rows(folder.path, people.of(folder.path))]
    assert states[0] == "here, late in round 1"
    assert states[1].startswith("gone since 2")
    assert states[2] == "withdrawn since round 1"
    assert people.rows(folder.path, roster)[0]["state"] == "the server is stopped"
    roster_command(folder.path, "rename", 1, "Clinic B")  # type: ignore[arg-type]
    roster_command(folder.path, "remove", 1)  # type: ignore[arg-type]
    roster_command(folder.path, as_json=True)
    assert '"name": "Clinic B"' in (shown := capsys.readouterr().out)
    assert "client 1 (Clinic B) is removed: its number is free" in shown
    with pytest.raises(InputError, match="no client 9"):
        roster_command(folder.path, "remove", 9)  # type: ignore[arg-type]


# -- nobody trains on alone -------------------------------------------------------------------------------------------


def test_sites_are_all_needed_by_default():
    assert config.resolve({"clients": {"partition": "sites", "total": 2}, "engine": "flower"}).guard.quorum == 1.0
    assert config.resolve({"clients": {"partition": "sites", "total": 2}, "guard": {"quorum": 0.5}}).guard.quorum == 0.5
    assert config.resolve({}).guard.quorum == 0.3


def two_sites(**keywords: Any) -> tuple[Assembled, LinkHere, FlowerEngine]:
    """A study among two sites, both there; its samples are what they say."""
    clients = {"partition": "sites", "total": 2, "per_round": 2, **keywords.pop("clients", {})}
    run, link = experiment(clients=clients, **keywords), LinkHere()
    link.start(7, [])
    link.start(8, [])
    people = meeting(run, link, Roster(2), sites=True)
    run = with_samples(run, [people.roster.entries[client].samples for client in range(2)])
    engine = FlowerEngine(people, run.bench, run.plan.samples, run.plan.engine, run.plan.needed, 5.0, 60.0, 0.05)
    return replace(run, plan=replace(run.plan, engine=engine)), link, engine


def test_a_study_of_two_sites_does_not_go_on_alone():
    run, link, engine = two_sites()
    steps = play(run.plan, run.method.begin(run.setup), 0, ClientRecords.of(run.plan.guard))
    assert next(steps).record.clients == [0, 1]
    worked = []

    def working(message: Message, worker: Worker) -> Message:
        worked.append(message)
        return worker.reply(message)

    link.manners[7] = working
    del link.workers[8]
    with pytest.raises(InputError) as caught, _explained(engine.fleet, Path("runs/study")):
        next(steps)
    words = str(caught.value)
    assert "client 1: not reachable" in words
    assert "`fedrts roster runs/study remove 1`" in words
    assert "guard.quorum" in words
    assert not worked, "who is here does not work, and gives nothing away, for nothing"
    assert any(line.startswith("LOST") and "cannot go on without client 1" in line for line in link.said), link.said


def test_a_site_that_hangs_is_waited_for_where_there_is_no_quorum_without_it(monkeypatch: pytest.MonkeyPatch):
    """A deadline that follows past rounds would end the study in a minute: every site is needed."""
    run, link, engine = two_sites(topology={"interval": 20, "end": 4, "first_outer": 20})
    engine.wait, engine.paces = 5.0, Paces(5.0)
    monkeypatch.setattr("fedrts.flower.engine._LEAST_ALLOWANCE", 0.2)
    steps = play(run.plan, run.method.begin(run.setup), 0, ClientRecords.of(run.plan.guard))
    for _ in range(3):
        assert next(steps).record.clients == [0, 1]
    held: list[Message] = []

    def hangs(message: Message, worker: Worker) -> Message | None:
        if message.metadata.message_type == WORK and not held:
            held.append(message)
            threading.Timer(1.0, lambda: link.answer(held[0], worker.reply(held[0]))).start()
            return None
        return worker.reply(message)

    link.manners[8] = hangs
    record = next(steps).record
    assert held
    assert record.clients == [0, 1]
    assert record.rejected == []
    assert any("waits for client 1" in line and "no quorum" in line for line in link.said), link.said


def test_a_site_that_is_lost_is_said_loudly_and_stands_in_history_and_report():
    run, link, _ = two_sites(guard={"quorum": 0.5})
    steps, lines = play(run.plan, run.method.begin(run.setup), 0, ClientRecords.of(run.plan.guard)), []
    lines.append(next(steps).record.as_dict())
    del link.workers[8]
    lines += [next(steps).record.as_dict() for _ in range(2)]
    link.start(8, [])
    lines.append(next(steps).record.as_dict())
    assert [line["clients"] for line in lines] == [[0, 1], [0], [0], [0, 1]]
    assert [line["rejected"] for line in lines[1:3]] == [[{"client": 1, "reason": "not reachable"}]] * 2
    assert len([line for line in link.said if line.startswith("LOST") and "goes without client 1" in line]) == 1
    assert any(line.startswith("back: round 3") for line in link.said)
    report = Run.__new__(Run)
    object.__setattr__(report, "history", lines)
    assert absences(report) == ["client 1 not reachable in rounds 1-2"]


# -- nobody waits for ever, and nobody excuses itself -----------------------------------------------------------------


def failing(code: int, reason: str) -> Answer:
    def answer(message: Message, worker: Worker) -> Message:
        if message.metadata.message_type != WORK:
            return worker.reply(message)
        return Message(Error(code, reason), reply_to=message)

    return answer


@pytest.mark.filterwarnings("ignore:client . is asked no more:UserWarning")
@pytest.mark.parametrize("word", ["late", "dropped out", "not reachable", "withdrawn", "late again"])
@pytest.mark.parametrize("how", ["facts", "error"])
def test_a_nodes_own_word_never_excuses_it(word: str, how: str):
    run, link = experiment(clients={"per_round": 5}), two_nodes()
    said = answering({}, {"failed": [1, 3], "reasons": [word, word]})
    link.manners[8] = said if how == "facts" else failing(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, word)
    ledger = ClientRecords.of(run.plan.guard)
    ready = connected(run, link)
    lines = [step.record.as_dict() for step in play(ready.plan, ready.method.begin(ready.setup), 0, ledger)]
    assert lines[0]["rejected"][0]["reason"] == f"its node says: {word}"
    assert ledger.strikes.counts == {1: 3, 3: 3}
    assert lines[-1]["rejected"] == [], "after three strikes it is asked no more"


@pytest.mark.filterwarnings("ignore:client . is asked no more:UserWarning")
@pytest.mark.parametrize("code", [ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE])
def test_a_node_cannot_say_that_it_is_not_there(code: int):
    run, link = experiment(clients={"per_round": 5}), two_nodes()
    link.manners[8] = failing(code, "Node Unavailable")
    ledger = ClientRecords.of(run.plan.guard)
    ready = connected(run, link)
    list(play(ready.plan, ready.method.begin(ready.setup), 0, ledger))
    assert ledger.strikes.counts == {1: 3, 3: 3}


def silent(message: Message, worker: Worker) -> Message | None:
    return worker.reply(message) if message.metadata.message_type != WORK else None


@pytest.mark.filterwarnings("ignore:client . was late:UserWarning")
def test_a_node_that_hangs_costs_ever_fewer_rounds_and_comes_back():
    run = experiment(clients={"per_round": 5}, rounds=16, topology={"interval": 20, "end": 16, "first_outer": 20})
    link = two_nodes()
    link.manners[8] = silent
    ledger, ready = ClientRecords.of(run.plan.guard), connected(run, link, timeout=0.5)
    lines, state = [], ready.method.begin(ready.setup)
    for index in range(16):
        step = play_round(ready.plan, state, index, ledger)
        state = step.state
        ledger = ClientRecords.restored(ledger.tensors(), state.mask.sizes, run.plan.guard, "cpu")  # as after a checkpoint
        lines.append(step.record.as_dict())
        if len(lines) == 8:
            link.manners.pop(8)
    reasons = [{entry["reason"] for entry in line["rejected"]} for line in lines]
    assert reasons[:8] == [{"late"}, {"late"}, {"late again"}, set(), {"late again"}, set(), set(), {"late again"}]
    assert [line["clients"] for line in lines[8:12]] == [[0, 2, 4]] * 4, "it is left in peace for four rounds"
    assert [line["clients"] for line in lines[12:]] == [[0, 1, 2, 3, 4]] * 4, "and comes back as soon as it answers in time"


def test_what_is_known_of_late_and_departed_clients_survives_a_checkpoint():
    run = experiment()
    ledger = ClientRecords.of(run.plan.guard)
    ledger.lateness = Lateness(1)
    with pytest.warns(UserWarning, match="late"):
        ledger.lateness.add(3, 7)
    ledger.departed[2] = 5
    state = run.method.begin(run.setup)
    again = ClientRecords.restored(ledger.tensors(), state.mask.sizes, run.plan.guard, "cpu")
    assert (again.lateness.counts, again.lateness.again, again.departed) == ({3: 1}, {3: 9}, {2: 5})
    before = {name: tensor for name, tensor in ledger.tensors().items() if name not in ("late", "departed")}
    assert not ClientRecords.restored(before, state.mask.sizes, run.plan.guard, "cpu").departed  # of an earlier version


def test_where_everybody_is_needed_a_late_client_is_asked_all_the_same():
    run, _, _ = two_sites(guard={"attempts": 1})
    ledger = ClientRecords.of(run.plan.guard)
    ledger.lateness.counts[1], ledger.lateness.again[1] = 3, 99
    assert next(play(run.plan, run.method.begin(run.setup), 0, ledger)).record.clients == [0, 1]
    assert not ledger.lateness.again


def test_the_deadline_follows_past_rounds_and_the_slowest_client():
    plan = experiment().plan
    mask = experiment().method.begin(experiment().setup).mask
    inner, outer = plan.round(1, mask), plan.round(0, mask)
    paces = Paces(5.0)
    for seconds in (0.7, 0.6, 900.0):
        assert paces.allowance(inner) == float("inf"), "first rounds have engine.timeout"
        paces.add(inner, 0, seconds)
    assert paces.allowance(inner) == 10.0, "one slow reply changes nothing"
    for seconds in (60.0, 61.0, 62.0):
        paces.add(inner, 1, seconds)
    assert paces.allowance(inner) == 5 * 61.0, "a site with more data than the others has its time"
    assert paces.allowance(outer) == float("inf"), "and other exchanges take longer"
    assert Paces(0.0).allowance(inner) == float("inf")


def test_a_hanging_node_is_waited_for_no_longer_than_past_rounds_suggest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedrts.flower.engine._LEAST_ALLOWANCE", 0.2)
    run, link = experiment(clients={"per_round": 5}, topology={"interval": 20, "end": 4, "first_outer": 20}), two_nodes()
    ready = connected(run, link, timeout=60.0, paces=Paces(5.0))
    steps = play(ready.plan, ready.method.begin(ready.setup), 0, ClientRecords.of(run.plan.guard))
    for _ in range(3):
        next(steps)
    link.manners[8] = silent
    record = next(steps).record
    assert {entry["reason"] for entry in record.rejected} == {"late"}
    assert record.seconds < 20


# -- the end, and an early one ----------------------------------------------------------------------------------------


def test_a_site_that_withdraws_is_asked_no_more_and_history_says_since_when(tmp_path: Path):
    run, link, engine = two_sites()
    engine.fleet.roster.file = tmp_path / "roster.json"
    steps = play(run.plan, run.method.begin(run.setup), 0, ledger := ClientRecords.of(run.plan.guard))
    lines = [next(steps).record.as_dict()]
    link.start(8, [])
    link.workers[8] = Worker(Host(), link.said.append, withdraws=True)
    for _ in range(3):
        engine.fleet.look()
    assert link.workers[8].parting == Parting("withdrawn", "the server says: this site takes part no more")
    link.workers[8].parting.obey(link.said.append)
    lines += [step.record.as_dict() for step in steps]
    assert [line["clients"] for line in lines] == [[0, 1], [0], [0], [0]], "the others are the quorum now"
    assert [line["rejected"] for line in lines] == [[], [{"client": 1, "reason": "withdrawn"}], [], []]
    assert ledger.departed == {1: 1}
    assert Roster(2, tmp_path / "roster.json").departed == {1: "withdrawn"}
    link.start(8, [])
    for _ in range(3):
        engine.fleet.look()
    assert any("withdrew or was removed" in line for line in link.said)


def test_those_who_stay_need_not_wait_for_those_who_withdrew():
    run, link, engine = two_sites(guard={"quorum": 0.5, "attempts": 1})
    engine.needed, engine.wait = replace(run.plan, per_round=10, samples=[1] * 10).needed, 0.05
    engine.fleet.roster.total = 10
    for client in range(2, 10):
        engine.fleet.roster.admit(client, Member(1, "x", f"key {client}"))
        engine.fleet.roster.leave(client, "withdrawn")
    plan = replace(run.plan, per_round=10, samples=[*run.plan.samples, *[1] * 8])
    del link.workers[8]
    assert next(play(plan, run.method.begin(run.setup), 0, ClientRecords.of(run.plan.guard))).record.clients == [0], "one of two is half"


def test_a_node_that_never_introduces_itself_holds_nobody_up(monkeypatch: pytest.MonkeyPatch):
    run, link = experiment(clients={"per_round": 5}), LinkHere()
    link.start(7, [0, 2, 4])
    link.start(9, [1, 3], lambda message, worker: None)
    ready = connected(run, link, wait=60.0)
    monkeypatch.setattr(fleet, "_ANSWER", 0.1)
    record = next(play(ready.plan, ready.method.begin(ready.setup), 0, ClientRecords.of(run.plan.guard))).record
    assert record.clients == [0, 2, 4]
    assert record.seconds < 20


def test_a_withdrawal_by_somebody_unknown_changes_nothing():
    _, link, engine = two_sites()
    link.start(9, [])
    link.workers[9] = Worker(Host(), link.said.append, withdraws=True)
    for _ in range(3):
        engine.fleet.look()
    assert link.workers[9].parting.why == "refused"  # type: ignore[union-attr]
    assert not engine.fleet.departed


def test_a_site_that_is_removed_while_a_round_waits_for_it_is_waited_for_no_more(monkeypatch: pytest.MonkeyPatch):
    run, link, engine = two_sites()
    engine.wait = 60.0
    steps = play(run.plan, run.method.begin(run.setup), 0, ClientRecords.of(run.plan.guard))
    next(steps)
    del link.workers[8]
    looks, look = [], engine.fleet.look

    def remove_later() -> None:
        look()
        looks.append(1)
        if len(looks) == 5:
            engine.fleet.roster.leave(1, "removed")

    monkeypatch.setattr(engine.fleet, "look", remove_later)
    record = next(steps).record
    assert record.clients == [0]
    assert {"client": 1, "reason": "removed"} in record.rejected


class Keeping(Host):
    """A host with a folder of its own."""

    state: Path


def keeping(folder: Path) -> Host:
    host = Keeping()
    object.__setattr__(host, "state", folder)
    return host


def test_sites_are_told_that_a_study_is_over_and_get_the_model_if_they_may(tmp_path: Path):
    run, link, engine = two_sites(clients={"share_model": True})
    link.workers[7].host = keeping(tmp_path)
    engine.fleet.dismiss(final.encoded(run))
    assert [worker.parting.why for worker in link.workers.values()] == ["finished"] * 2  # type: ignore[union-attr]
    for worker in link.workers.values():
        worker.parting.obey(link.said.append)  # type: ignore[union-attr]
    kept = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name, tensor in run.module.state_dict().items():
        assert torch.equal(kept[name], tensor), name
    assert any("no folder to keep it in" in line for line in link.said)


def test_a_final_model_that_is_none_is_not_kept(tmp_path: Path):
    run, link, _ = two_sites(clients={"share_model": True})
    other = experiment(clients={"partition": "sites"}, model_options={"hidden": [3]})
    whole = final.encoded(run)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    with torch.no_grad():
        next(iter(run.module.parameters())).view(-1)[0] = float("nan")
    worker = link.workers[7]
    worker.host = keeping(tmp_path)
    for blob in (b"", b"nonsense", bytes(damaged), final.encoded(other), final.encoded(run)):
        worker.part({"why": "finished", "text": ""}, {0: blob})
        assert "the final model was not kept" in link.said[-1]
    assert not list(tmp_path.iterdir())


def test_a_model_that_the_experiment_does_not_give_is_not_taken(tmp_path: Path):
    run, link, _ = two_sites()
    link.workers[7].host = keeping(tmp_path)
    link.workers[7].part({"why": "finished", "text": ""}, {0: final.encoded(run)})
    assert not list(tmp_path.iterdir())


def test_the_end_does_not_wait_for_ever_for_a_node_that_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet, "_GOODBYE", 0.5)
    _, link, engine = two_sites()
    link.manners[8] = lambda message, worker: None
    engine.fleet.dismiss(None)
    assert link.workers[7].parting == Parting("finished", "the server says: the study is finished")
