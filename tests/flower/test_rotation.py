"""Keys and certificates are replaced, revoked and renewed while real processes go on."""

from __future__ import annotations

import datetime
import json
import re
import ssl
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

from cryptography import x509

import fedrts
from federating import EXPERIMENT, Folder, Running, free_port
from fedrts import cli
from fedrts.audit.check import checked, compared
from fedrts.audit.witness import Witness
from fedrts.errors import InputError
from fedrts.flower import certificates, keys
from fedrts.flower.certificates import Certificates
from fedrts.flower.keys import Authority, fingerprint, read_verifier
from fedrts.flower.roster import Member, Roster
from fedrts.meters.board import Board


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path / "authority")
    made.init(["fl.example.org"])
    made.register(keys.issue("a", tmp_path)[1], clients=[3])
    return made


def test_a_key_is_followed_by_one_that_it_signed(tmp_path: Path, authority: Authority):
    before = fingerprint((tmp_path / "a.pub").read_bytes())
    _, public = keys.rotate(tmp_path / "a.key")
    with pytest.raises(InputError, match="is there already"):
        keys.rotate(tmp_path / "a.key")
    after = authority.replace("a", public)
    assert fingerprint(authority.registered()["a"]) == after != before
    seat = authority.seats()["a"]
    assert (seat.clients, seat.former) == ((3,), (before,)), "its numbers stay"
    assert read_verifier(authority.folder / "replaced" / f"a-{before}.pub"), "an auditor still needs it"
    keys.adopt(tmp_path / "a.key")
    assert fingerprint((tmp_path / "a.pub").read_bytes()) == after
    assert fingerprint((tmp_path / f"a.{before}.pub").read_bytes()) == before
    assert sorted(path.name for path in tmp_path.glob("a.*")) == sorted(["a.key", "a.pub", f"a.{before}.pub"])


def test_another_ones_signature_or_none_is_refused(tmp_path: Path, authority: Authority):
    authority.register(keys.issue("b", tmp_path)[1])
    _, stolen = keys.rotate(tmp_path / "b.key")
    with pytest.raises(InputError, match="is not by the key of 'a'"):
        authority.replace("a", stolen)
    _, plain = keys.issue("a-new", tmp_path)
    with pytest.raises(InputError, match="add --unsigned"):
        authority.replace("a", plain)
    with pytest.raises(InputError, match="no node 'c'"):
        authority.replace("c", plain)
    with pytest.raises(InputError, match="registered already, as 'b'"):
        authority.replace("a", tmp_path / "b.pub", unsigned=True)
    assert authority.replace("a", plain, unsigned=True) == fingerprint(plain.read_bytes())


def test_a_key_that_follows_a_barred_one_is_barred():
    roster = Roster(2)
    roster.admit(0, Member(10, "data", "old"))
    roster.leave(0, "removed")
    roster.follow(["old"], "new")
    with pytest.raises(InputError, match="withdrew or was removed"):
        roster.admit(0, Member(10, "data", "new"))


def test_a_certificate_that_expires_soon_is_warned_of_once_a_day(authority: Authority, monkeypatch: pytest.MonkeyPatch):
    certificate = x509.load_pem_x509_certificate(authority.server_certificate.read_bytes())
    said: list[str] = []
    board = Board("server")
    known = Certificates(said.append, board, {"server": "renew it"})
    known.show("server", certificate)
    assert said == []
    ends = certificate.not_valid_after_utc.timestamp()
    shown = re.search(r'fedrts_certificate_expiry_timestamp_seconds\{certificate="server"\} (\S+)', board.text.decode())
    assert shown is not None
    assert float(shown[1]) == ends
    monkeypatch.setattr(certificates, "SOON", datetime.timedelta(days=900))
    again = Certificates(said.append, Witness(), {"server": "renew it"})
    again.show("server", certificate)
    again.show("server", certificate)
    (line,) = said
    assert line.startswith("EXPIRES: the certificate of the server expires on")
    assert line.endswith("in 824 days: renew it")
    monkeypatch.setattr(certificates, "_AGAIN", 0.0)
    again.show("server", certificate)
    assert len(said) == 2


def test_keys_by_their_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """As docs/deployment.md has them."""
    monkeypatch.chdir(tmp_path)
    Authority(tmp_path / "authority").init([])
    Authority(tmp_path / "authority").register(keys.issue("clinic-a", tmp_path)[1])
    for command in ("fedrts keys rotate clinic-a.key", "fedrts keys replace clinic-a clinic-a.next.pub --dir authority"):
        monkeypatch.setattr("sys.argv", command.split())
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0
    after = fingerprint(keys.read_successor(tmp_path / "clinic-a.next.pub")[0])
    assert f"'clinic-a' has the key {after} now" in capsys.readouterr().out


def served(folder: Folder) -> int:
    """The serial number of the certificate that the server shows to whoever connects now."""
    pem = ssl.get_server_certificate(("127.0.0.1", folder.port), timeout=20)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_keys_and_certificates_change_while_the_study_goes_on(start: Callable[..., Running], folder: Folder, tmp_path: Path):
    """A site's key is replaced, the server's certificate renewed; the model is that of a run where nothing happened."""
    folder.experiment.write_text(EXPERIMENT.replace("rounds = 3", "rounds = 25").replace("epochs = 1", "epochs = 10"))
    meters = free_port()
    server = start(*folder.server(), "--metrics", meters)
    nodes = [start(*folder.client(number, f"{number},{number + 3}")) for number in range(3)]
    server.until("round    2 of 25")
    old, former = read_verifier(folder.authority.server_certificate), folder.keys[1].with_suffix(".pub").read_bytes()
    first = served(folder)
    folder.authority.renew([])
    _, public = keys.rotate(folder.keys[1])
    after = folder.authority.replace("site-1", public)
    server.until(f"the key of 'site-1' was replaced: {fingerprint(former)} is followed by {after}")
    nodes[1].until(f"this node has the key {after} now")
    server.until("the server's certificate was renewed")
    due = time.monotonic() + 30
    while (now := served(folder)) == first and time.monotonic() < due:
        time.sleep(0.2)
    renewed = x509.load_pem_x509_certificate(folder.authority.server_certificate.read_bytes())
    assert now == renewed.serial_number != first
    shown = urllib.request.urlopen(f"http://127.0.0.1:{meters}/metrics", timeout=20).read().decode()
    expiry = re.search(r'fedrts_certificate_expiry_timestamp_seconds\{certificate="server"\} (\S+)', shown)
    assert expiry is not None
    assert float(expiry[1]) == renewed.not_valid_after_utc.timestamp()
    assert server.ended(400) == 0, server.text
    assert [node.ended(60) for node in nodes] == [0, 0, 0]
    run = folder.path / "run"
    roster = json.loads((run / "roster.json").read_text())
    assert [roster[client]["key"] for client in ("1", "4")] == [after] * 2, "it has its numbers still"
    logs = (run / "audit.jsonl", folder.keys[1].with_suffix(".site") / "audit.jsonl")
    events = [json.loads(line) for line in logs[0].open()]
    (change,) = [event for event in events if event["event"] == "key replaced"]
    assert (change["before_key"], change["key"]) == (fingerprint(former), after)
    public_keys = {fingerprint(key): key for key in (old, read_verifier(folder.authority.server_certificate), former, public_of(folder, 1))}
    assert [checked(log, public_keys).torn for log in logs] == [0, 0]
    assert compared(logs[1], logs[0], public_keys).agreed > 0
    fedrts.run(folder.experiment, engine="serial", out=tmp_path / "serial")
    for name in ("model.safetensors", "masks.safetensors", "topology.jsonl"):
        assert (run / name).read_bytes() == (tmp_path / "serial" / name).read_bytes(), name


def public_of(folder: Folder, number: int) -> bytes:
    return folder.keys[number].with_suffix(".pub").read_bytes()
