"""What goes on record in a federation: a node's log and the server's agree about every message, whoever dies; who lies is found."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

from flwr.app import Message

from fedrts.audit.check import AuditError, checked, compared
from fedrts.audit.log import FILE, AuditLog
from fedrts.audit.witness import Witnesses
from fedrts.cli.app import app
from fedrts.errors import InputError
from fedrts.flower import HELLO, WORK
from fedrts.flower.keys import fingerprint, read_verifier, seal_of
from fedrts.flower.messages import content, opened
from fedrts.flower.node import Worker
from fedrts.observe.told import Told
from fedrts.secure.identity import public_key
from linkhere import LinkHere, connected, experiment, nobody_waits, played, two_nodes


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch):
    nobody_waits(monkeypatch)


def on_record(link: LinkHere, folder: Path, **keywords: Any) -> dict[str, Path]:
    """The logs of a whole run: of the server, and of every node by its number."""
    logs = {"server": AuditLog(folder / "server.jsonl", "server")}
    for number, worker in link.workers.items():
        logs[str(number)] = AuditLog(folder / f"{number}.jsonl", "node", seal_of(link.private_keys[number]))
        worker.witness = Witnesses(logs[str(number)])
    played(connected(experiment(**keywords), link, logs["server"]))
    for log in logs.values():
        log.close()
    return {name: log.file for name, log in logs.items()}


def test_both_sides_say_the_same_of_every_message(tmp_path: Path):
    link = two_nodes()
    files = on_record(link, tmp_path)
    total = 0
    for number in (7, 8):
        found = compared(files[str(number)], files["server"])
        assert found.under_way == []
        assert found.heads > 0
        total += found.agreed
        checked(files[str(number)], {fingerprint(public_key(link.private_keys[number])): public_key(link.private_keys[number])})
    lines = [json.loads(line) for line in files["server"].read_bytes().splitlines()]
    events = Counter(line["event"] for line in lines)
    messages = sum(len(line["clients"]) for line in lines if line["event"] in ("asked", "received"))
    assert messages == 4 * 3 * 2, "four rounds of three clients, there and back"
    assert total == messages + events["hello"] + events["told"]
    assert sum(entry[0] for line in lines if line["event"] == "asked" for entry in line["clients"].values()) == link.down


def test_a_reply_that_was_changed_on_its_way_is_found(tmp_path: Path):
    link = LinkHere()

    def otherwise(message: Message, worker: Worker) -> Message:
        reply = worker.reply(message)
        if message.metadata.message_type != WORK:
            return reply
        facts, blobs = opened(reply)
        return Message(content(facts, {client: data[:-1] + bytes([data[-1] ^ 1]) for client, data in blobs.items()}), reply_to=message)

    link.start(7, [0, 2, 4], otherwise)
    link.start(8, [1, 3])
    with pytest.raises(InputError):  # its replies are rejected, and there are too few
        on_record(link, tmp_path, guard={"quorum": 1.0, "attempts": 1})
    with pytest.raises(AuditError, match="does not say that it was sent so"):
        compared(tmp_path / "7.jsonl", tmp_path / "server.jsonl")
    compared(tmp_path / "8.jsonl", tmp_path / "server.jsonl")


def test_no_log_holds_what_a_message_holds(tmp_path: Path):
    link, seen = two_nodes(), list[bytes]()

    def looking(message: Message, worker: Worker) -> Message:
        reply = worker.reply(message)
        if message.metadata.message_type != HELLO:
            seen.extend(data for each in (message, reply) for data in opened(each)[1].values())
        return reply

    link.manners = {7: looking, 8: looking}
    files = on_record(link, tmp_path)
    text = b"".join(file.read_bytes() for file in files.values())
    assert len(seen) > 20
    assert not any(data[8:24] in text or data[8:24].hex().encode() in text for data in seen)


def test_a_site_s_privacy_goes_on_record(tmp_path: Path):
    link = two_nodes()
    files = on_record(link, tmp_path, privacy={"clip": 0.5, "noise": 0.5, "index_epsilon": 0.5})
    lines = [json.loads(line) for line in files["7"].read_bytes().splitlines()]
    spent = [line["epsilon"]["0"] for line in lines if line["event"] == "sent" and "0" in line.get("epsilon", {})]
    assert len(spent) >= 2
    assert spent == sorted(spent)
    assert 0 < spent[0] < spent[-1]


def test_a_round_says_what_it_came_to(tmp_path: Path, toy: Any):
    log = AuditLog(tmp_path / "audit.jsonl", "server")
    told = Told(log)
    run = experiment()
    told.started(run.experiment, {"density": 0.5, "parameters": 7, "bytes": 0, "epsilon": lambda: 2.5}, 0)
    from fedrts.server.rounds import Record

    told.played(Record(0, True, [1], [{"client": 2, "reason": "late"}], loss=0.5, upload_bytes=7, federated={"clients": "secret"}))
    told.stopped()
    log.close()
    lines = {line["event"]: line for line in map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())}
    assert lines["configured"]["settings"]["rounds"] == 4
    assert (lines["round"]["clients"], lines["round"]["rejected"]) == ([1], [{"client": 2, "reason": "late"}])
    assert (lines["round"]["metrics"], lines["round"]["epsilon"], lines["round"]["upload_bytes"]) == ({"loss": 0.5}, 2.5, 7)
    assert "secret" not in (tmp_path / "audit.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whoever_is_killed_the_record_stays_whole(start: Any, folder: Any, capsys: pytest.CaptureFixture[str]):
    """Real processes: a node and the server are killed once each, a line is torn, a key is revoked; metrics are there throughout."""
    from federating import free_port

    def metrics(port: int) -> dict[str, float]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        text = opener.open(f"http://127.0.0.1:{port}/metrics", timeout=20).read().decode()
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    text = (
        folder.experiment.read_text().replace("rounds = 3", "rounds = 12").replace("total = 6, per_round = 4", "total = 4, per_round = 4")
    )
    folder.experiment.write_text(text + "guard = {quorum = 0.5}\n")
    run, ports = folder.path / "run", [free_port() for _ in range(2)]
    command = [*folder.server(), "--metrics", ports[0]]
    server = start(*command)
    server.until("waiting for nodes")
    nodes = [
        start(*folder.client(number, f"{number},{number + 2}"), *(["--metrics", ports[1]] if number == 0 else [])) for number in (0, 1)
    ]
    server.until("round    3 of 12")
    nodes[1].kill()
    again = start(*folder.client(1, "1,3"))
    server.until("round    6 of 12")
    there = metrics(ports[0])
    assert there["fedrts_rounds_done"] >= 6
    assert there["fedrts_clients_expected"] == 4
    assert metrics(ports[1])["fedrts_ready"] == 1
    server.kill()
    server.process.wait(20)
    with open(run / FILE, "ab") as log:
        log.write(b'{"line":')
    server = start(*command)
    server.until("is cut off")
    folder.authority.revoke("site-2")
    assert server.ended() == 0, server.text
    for node in (nodes[0], again):
        assert node.ended(60) == 0, node.text

    key = folder.authority.server_certificate
    found = checked(run / FILE, {fingerprint(read_verifier(key)): read_verifier(key)})
    assert found.unsigned == 0
    lines = [json.loads(line) for line in (run / FILE).read_bytes().splitlines()]
    events = Counter(line["event"] for line in lines)
    assert (events["began"], events["healed"], events["finished"], events["key revoked"]) == (2, 1, 1, 1)
    assert {line["round"] for line in lines if line["event"] == "round"} == set(range(12))
    for number in (0, 1):
        own = folder.keys[number].with_suffix(".site") / FILE
        app(
            ["audit", "compare", str(own), str(run / FILE), "--key", str(folder.keys[number].with_suffix(".pub")), "--key", str(key)],
            standalone_mode=False,
        )
        assert "have the same size and digest in both logs" in capsys.readouterr().out
