"""Audit logs: whatever is done to one shows, and names the line; a crash is healed; two logs are held against each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="fedrts[secure] is not installed")

from cryptography.hazmat.primitives.asymmetric import ec

from fedrts.audit.check import AuditError, checked, compared
from fedrts.audit.lines import Head, Seal, head_file, written
from fedrts.audit.log import CONFIGURED, AuditLog
from fedrts.audit.witness import entries
from fedrts.cli.app import app
from fedrts.errors import InputError
from fedrts.secure.identity import public_key, signer

KEY, OTHER = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
SEAL = Seal("ours", signer(KEY))
KEYS = {"ours": public_key(KEY)}


def make(file: Path, events: int = 12, seal: Seal | None = SEAL) -> list[bytes]:
    """A log of two heads (after `began` and at the end) and so many events between them; its lines."""
    log = AuditLog(file, "server", seal)
    for number in range(events):
        log("asked", round=number, clients=entries({0: b"order %d" % number}))
    log.close()
    return file.read_bytes().splitlines(keepends=True)


def fault(file: Path, keys: dict[str, bytes] | None = None) -> int:
    """The line that a check names."""
    with pytest.raises(AuditError) as caught:
        checked(file, keys)
    assert f"line {caught.value.line}: " in str(caught.value)
    assert caught.value.code == 1
    return caught.value.line


def test_a_log_is_whole(tmp_path: Path):
    lines = make(tmp_path / "audit.jsonl")
    found = checked(tmp_path / "audit.jsonl", KEYS)
    assert [json.loads(line)["event"] for line in lines] == ["began", "head", *["asked"] * 12, "head"]
    assert (found.lines, found.unsigned, found.torn, len(found.heads)) == (15, 0, 0, 2)
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o077 == 0


def forged(text: bytes, **changes: Any) -> bytes:
    """A line with other content and a hash that fits it."""
    content = {**json.loads(text), **changes}
    facts = {key: value for key, value in content.items() if key not in ("line", "at", "event", "before", "hash")}
    return written(content["line"], content["at"], content["event"], facts, content["before"])[0]


@settings(max_examples=40)
@given(place=st.integers(0, 14), how=st.sampled_from(["byte", "forged", "removed", "repeated", "swapped", "cut"]), data=st.data())
def test_whatever_is_done_to_a_line_is_found_there(tmp_path_factory: pytest.TempPathFactory, place: int, how: str, data: st.DataObject):
    file = tmp_path_factory.mktemp("log") / "audit.jsonl"
    lines = make(file)
    expected = place + 1
    if how == "byte":
        at = data.draw(st.integers(0, 2**16)) % (len(lines[place]) - 1)  # times and signatures make lines of any length
        changed = [value for value in range(256) if value not in (lines[place][at], 10)]
        other = changed[data.draw(st.integers(0, len(changed) - 1))]
        lines[place] = lines[place][:at] + bytes([other]) + lines[place][at + 1 :]
    elif how == "forged":
        lines[place] = forged(lines[place], at="2001-01-01T00:00:00.000+00:00")
    elif how == "removed":
        del lines[place]
    elif how == "repeated":
        lines.insert(place, lines[place])
        expected += 1
    elif how == "swapped":
        place = min(place, 13)
        lines[place], lines[place + 1] = lines[place + 1], lines[place]
        expected = place + 1
    else:
        del lines[place:]
    file.write_bytes(b"".join(lines))
    if place == 14 and how == "forged":  # the line of the last head: what it signs holds, and nothing vouches for its time yet
        assert checked(file).lines == 15
        return
    assert fault(file) == expected


def test_a_log_that_was_written_anew_is_found_by_the_signature(tmp_path: Path):
    """Hashes that fit are no proof: whoever has no key cannot sign what they rewrote."""
    file = tmp_path / "audit.jsonl"
    make(file)
    lines, before, text = file.read_bytes().splitlines(keepends=True), "0" * 64, b""
    for number, line in enumerate(lines, 1):
        content = json.loads(line)
        facts: dict[str, Any] = {key: value for key, value in content.items() if key not in ("line", "at", "event", "before", "hash")}
        if number == 5:
            facts["round"] = 99
        if "of" in facts:
            facts["of"] = {**facts["of"], "line": number - 1, "hash": before}
        more, before = written(number, content["at"], content["event"], facts, before)
        text += more
    file.write_bytes(text)
    assert fault(file) == 14, "the head beside it is of another line 14"
    head_file(file).unlink()
    assert checked(file).lines == 15, "without keys nobody can tell"
    assert fault(file, KEYS) == 15


def test_a_log_signed_by_somebody_else_or_by_nobody_is_refused(tmp_path: Path):
    make(tmp_path / "other.jsonl", seal=Seal("ours", signer(OTHER)))
    make(tmp_path / "none.jsonl", seal=None)
    make(tmp_path / "unknown.jsonl", seal=Seal("theirs", signer(OTHER)))
    for name, words in (("other", "is not by the key ours"), ("none", "is not signed"), ("unknown", "which --key does not name")):
        with pytest.raises(AuditError, match=words):
            checked(tmp_path / f"{name}.jsonl", KEYS)
    assert checked(tmp_path / "none.jsonl").unsigned == 15


def test_a_head_that_was_given_away_holds_an_older_log(tmp_path: Path):
    file = tmp_path / "audit.jsonl"
    make(file)
    shutil.copy(file, tmp_path / "old.jsonl")
    shutil.copy(head_file(file), tmp_path / "old.head")
    make(file, 3)
    given = Head.parsed(head_file(file).read_bytes())
    assert given is not None
    checked(file, KEYS, [given])
    shutil.copy(tmp_path / "old.jsonl", file)  # a backup of both, with which nothing beside them is wrong
    shutil.copy(tmp_path / "old.head", head_file(file))
    assert checked(file, KEYS).lines == 15
    with pytest.raises(AuditError, match="line 16: it is missing, and so are all up to line 20"):
        checked(file, KEYS, [given])


@pytest.mark.parametrize("lost", [1, 40, 200])
def test_a_line_that_was_not_written_to_its_end_is_healed_and_said(tmp_path: Path, lost: int):
    file, said = tmp_path / "audit.jsonl", list[str]()
    log = AuditLog(file, "node", SEAL)
    log("asked", round=0, clients={})
    log("sent", round=0, clients=entries({0: b"x", 1: b"y"}))
    file.write_bytes(whole := file.read_bytes()[:-lost])  # killed there: no head, no close
    torn = len(whole) - whole.rindex(b"\n") - 1
    assert checked(file).torn == torn
    again = AuditLog(file, "node", SEAL, said.append)
    again("asked", round=1, clients={})
    again.close()
    assert said == [f"the last line of {file} was not written to its end: it is cut off"]
    found = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert [line["event"] for line in found] == ["began", "head", "asked", "began", "healed", "head", "asked", "head"]
    assert found[4]["bytes"] == torn
    assert checked(file, KEYS).lines == 8


def test_a_damaged_log_is_not_gone_on_with(tmp_path: Path):
    file = tmp_path / "audit.jsonl"
    lines = make(file)
    file.write_bytes(b"".join([*lines[:4], *lines[5:]]))
    with pytest.raises(InputError, match=r"line 5: .* move it away") as caught:
        AuditLog(file, "server", SEAL)("asked")
    assert caught.value.code == 2
    assert file.read_bytes() == b"".join([*lines[:4], *lines[5:]])


def test_only_changes_of_the_settings_are_written(tmp_path: Path):
    file = tmp_path / "audit.jsonl"
    for changes in ({}, {}, {"guard.quorum": 1}, {"guard.quorum": 1}, {"rounds": 3}):
        log = AuditLog(file, "server")
        log(CONFIGURED, settings={"rounds": 2, "lr": 0.1, **changes})
        log.close()
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    told = [(line.get("settings"), line.get("changed")) for line in lines if line["event"] == CONFIGURED]
    assert told == [
        ({"rounds": 2, "lr": 0.1}, None),
        (None, {"guard.quorum": [None, 1]}),
        (None, {"guard.quorum": [1, None], "rounds": [2, 3]}),
    ]


def test_heads_are_signed_at_most_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr("fedrts.audit.log.time.monotonic", lambda: now)
    log = AuditLog(tmp_path / "audit.jsonl", "server", SEAL)
    for _ in range(20):
        log("round")
        log.seal()
        now += 1.0
    assert len(checked(tmp_path / "audit.jsonl", KEYS).heads) == 4


def both(folder: Path, node: str = "ours") -> tuple[AuditLog, AuditLog]:
    """The logs of a node and of its server after three rounds, in which every message came, each with the other's heads."""
    here = AuditLog(folder / "node.jsonl", "node", Seal(node, signer(KEY)))
    there = AuditLog(folder / "server.jsonl", "server", Seal("server", signer(OTHER)))
    for number in range(3):
        down, up = (entries({0: b"%s %d" % (way, number)}) for way in (b"down", b"up"))
        place = {"round": number, "exchange": 0}
        there("asked", key=node, **place, clients=down)
        there("asked", key="another node", **place, clients=entries({1: b"?"}))
        here.heard(there.head)
        here("asked", **place, clients=down)
        here("sent", **place, clients=up)
        here.seal(always=True)
        there("received", key=node, **place, clients=up)
        there.heard(here.head, key=node)
        there.seal(always=True)
    return here, there


def test_a_node_and_its_server_agree(tmp_path: Path):
    here, there = both(tmp_path)
    here("sent", round=3, exchange=0, clients=entries({0: b"late"}))
    for log in (here, there):
        log.close()
    found = compared(tmp_path / "node.jsonl", tmp_path / "server.jsonl", {"ours": public_key(KEY), "server": public_key(OTHER)})
    assert (found.agreed, found.heads) == (6, 6)
    assert len(found.under_way) == 1
    assert "client 0's message of round 3" in found.under_way[0]


@pytest.mark.parametrize("who", ["node", "server"])
def test_who_says_otherwise_than_the_other_is_found(tmp_path: Path, who: str):
    here, there = both(tmp_path)
    if who == "server":  # it claims to have received what nobody sent
        there("received", key="ours", round=3, exchange=0, clients=entries({0: b"made up"}))
    else:
        here("asked", round=3, exchange=0, clients=entries({0: b"made up"}))
    for log in (here, there):
        log.close()
    with pytest.raises(AuditError, match=r"came here, and .* does not say that it was sent so") as caught:
        compared(tmp_path / "node.jsonl", tmp_path / "server.jsonl")
    assert f"{who}.jsonl" in str(caught.value)


def test_a_log_written_anew_by_who_has_the_key_does_not_fit_the_heads_it_gave_away(tmp_path: Path):
    (tmp_path / "anew").mkdir()
    for log in both(tmp_path):
        log.close()
    anew, again = both(tmp_path / "anew")  # at another time: all lines have other hashes
    anew.close()
    again.close()
    with pytest.raises(AuditError, match=r"gave its line [25] as another one"):
        compared(tmp_path / "anew" / "node.jsonl", tmp_path / "server.jsonl")


def test_what_is_no_log_of_a_node_or_server_is_refused(tmp_path: Path):
    for log in both(tmp_path):
        log.close()
    with pytest.raises(InputError, match="no log of a node"):
        compared(tmp_path / "server.jsonl", tmp_path / "node.jsonl")
    with pytest.raises(InputError, match="no log of a server"):
        compared(tmp_path / "node.jsonl", tmp_path / "node.jsonl")


def test_the_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, key = tmp_path / "audit.jsonl", tmp_path / "ours.pub"
    key.write_bytes(public_key(KEY))
    log = AuditLog(file, "server", Seal(_name(key), signer(KEY)))
    log("asked", round=0, clients={})
    log.close()
    app(["audit", "verify", str(file), "--key", str(key), "--head", str(head_file(file))], standalone_mode=False)
    said = capsys.readouterr().out
    assert "4 lines hang together; 2 of 2 heads are signed by" in said
    assert "0 lines after the last signed head" in said
    file.write_bytes(file.read_bytes().replace(b'"round":0', b'"round":1'))
    with pytest.raises(InputError, match="line 3: it was changed") as caught:
        app(["audit", "verify", str(file)], standalone_mode=False)
    assert caught.value.code == 1
    for words in (["audit", "verify", str(tmp_path / "none")], ["audit", "verify", str(file), "--head", str(key)]):
        with pytest.raises(InputError) as caught:
            app(words, standalone_mode=False)
        assert caught.value.code == 2


def _name(key: Path) -> str:
    pytest.importorskip("flwr", reason="fedrts[flower] is not installed")
    from fedrts.flower.keys import fingerprint

    return fingerprint(key.read_bytes())
