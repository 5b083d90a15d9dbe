"""Certificates, keys, and the gate in front of Flower's SuperLink."""

from __future__ import annotations

import asyncio
import base64
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedrts import cli
from fedrts.errors import InputError
from fedrts.flower import keys
from fedrts.flower.keys import Authority
from fedrts.flower.limits import refused
from fedrts.flower.link import Address
from fedrts.flower.superlink import Gate, _verified


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_authority_vouches_for_its_server(tmp_path: Path):
    authority = Authority(tmp_path / "authority")
    authority.init(["fl.example.org", "10.0.0.1"])
    ca, server = (x509.load_pem_x509_certificate(file.read_bytes()) for file in (authority.certificate, authority.server_certificate))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "fl.example.org" in names.get_values_for_type(x509.DNSName)
    assert "10.0.0.1" in map(str, names.get_values_for_type(x509.IPAddress))
    public = server.public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert isinstance(public.curve, ec.SECP384R1)
    assert mode(authority.server_key) == mode(tmp_path / "authority" / "ca.key") == 0o600
    before = authority.certificate.read_bytes()
    authority.renew(["other.example.org"])
    renewed = x509.load_pem_x509_certificate(authority.server_certificate.read_bytes())
    renewed.verify_directly_issued_by(ca)
    assert renewed.serial_number != server.serial_number
    assert authority.certificate.read_bytes() == before
    with pytest.raises(InputError, match="holds an authority already"):
        authority.init([])


def test_nodes_are_registered_and_revoked_by_name(tmp_path: Path):
    authority = Authority(tmp_path / "authority")
    authority.init([])
    private, public = keys.issue("clinic-a", tmp_path)
    assert mode(private) == 0o600
    assert authority.register(public) == "clinic-a"
    assert authority.registered() == {"clinic-a": public.read_bytes()}
    _, other = keys.issue("clinic-b", tmp_path)
    for file, name, words in ((public, "again", "registered already, as 'clinic-a'"), (other, "clinic-a", "has another key")):
        with pytest.raises(InputError, match=words):
            authority.register(file, name)
    authority.revoke("clinic-a")
    assert authority.registered() == {}
    for name, words in (("clinic-a", "no node 'clinic-a'"), ("../ca", "is no name")):
        with pytest.raises(InputError, match=words):
            authority.revoke(name)
    with pytest.raises(InputError, match="is there already"):
        keys.issue("clinic-a", tmp_path)


def test_keys_of_another_kind_are_refused(tmp_path: Path):
    pem = ed25519.Ed25519PrivateKey.generate().public_key()
    file = tmp_path / "ed.pub"
    file.write_bytes(pem.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(InputError, match="P-384"):
        keys.read_public_key(file)
    file.write_text("nonsense")
    with pytest.raises(InputError, match="cannot read the public key"):
        keys.read_public_key(file)


@pytest.mark.parametrize("text", ["9092", "host:", "host:99999", ":80"])
def test_an_address_is_a_host_and_a_port(text: str):
    with pytest.raises(InputError, match="HOST:PORT"):
        Address.of(text)


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": scope.get("inner", 200), "headers": []})
    await send({"type": "http.response.body", "body": b"because"})


async def _nothing() -> Any:
    return {"type": "http.request", "body": b""}


def asked(path: str, peer: str = "10.1.2.3", inner: int = 200, closed_until: str | None = None, **headers: str) -> int:
    statuses: list[int] = []

    async def send(event: Any) -> None:
        if event["type"] == "http.response.start":
            statuses.append(event["status"])

    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "client": (peer, 1), "headers": encoded, "inner": inner, "server": ("10.9.9.9", 9092)}
    asyncio.run(Gate(_app, longest=100, closed_until=closed_until, name="word")(scope, _nothing, send))
    return statuses[0]


def test_the_gate_lets_strangers_reach_what_nodes_need_and_nothing_else(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    assert asked("/v1/fleet/pull-messages", content_length="10") == 200
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/"):
        assert asked(path) == 403
        assert asked(path, peer="127.0.0.1") == 200
    assert asked("/v1/control/start-run", peer="::1") == 200
    assert asked("/v1/control/start-run", peer="") == 403
    assert asked("/word") == 200, "whoever knows its word may ask whether it is there"
    assert asked("/v1/control/start-run", peer="10.9.9.9") == 200, "the server's own address"
    assert asked("/v1/fleet/push-object", content_length="101") == 413
    assert asked("/v1/fleet/push-object", transfer_encoding="chunked") == 411
    assert asked("/v1/fleet/push-object", transfer_encoding="chunked", content_length="5") == 411
    capfd.readouterr()
    refused.sum_up()
    assert asked("/v1/control/\x1b[2J") == 403
    said = capfd.readouterr().out
    assert "[2J" in said
    assert "\x1b" not in said
    refused.sum_up()
    gate = tmp_path / "open"
    assert asked("/v1/fleet/activate-node", closed_until=str(gate)) == 503
    gate.touch()
    assert asked("/v1/fleet/activate-node", closed_until=str(gate)) == 200
    capfd.readouterr()
    assert asked("/v1/fleet/activate-node", inner=412, flwr_public_key=base64.b64encode(b"a key").decode()) == 412
    assert capfd.readouterr().out == f"refused: 10.1.2.3 with key {keys.fingerprint(b'a key')} at /v1/fleet/activate-node: 412 because\n"


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fedrts(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["fedrts", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, said.out, said.err

    folder = tmp_path / "authority"
    experiment = tmp_path / "study.toml"
    experiment.write_text("rounds = 2")
    assert fedrts("keys", "init", folder, "--host", "fl.example.org")[0] == 0
    assert fedrts("keys", "init", tmp_path / "compose", "--host", "fedrts_server")[0] == 0
    assert fedrts("keys", "issue", "clinic-a", "--dir", tmp_path)[0] == 0
    (folder / "nodes").rmdir()  # as in a copy that keeps no empty folders
    code, out, _ = fedrts("keys", "register", tmp_path / "clinic-a.pub", "--dir", folder)
    assert (code, out) == (0, f"registered 'clinic-a' with key {keys.fingerprint((tmp_path / 'clinic-a.pub').read_bytes())}\n")
    assert fedrts("keys", "revoke", "clinic-a", "--dir", folder) == (0, "revoked 'clinic-a'\n", "")
    for arguments, words in (
        (("keys", "revoke", "clinic-a", "--dir", folder), "no node 'clinic-a' is registered"),
        (("server", experiment), "give either --tls DIR"),
        (("server", experiment, "--tls", tmp_path / "nothing"), "has no ca.pem"),
        (("server", experiment, "--insecure", "--address", "here"), "an address is HOST:PORT"),
        (("client", "--server", "a:1"), "give --key FILE"),
        (("client", "--server", "a:1", "--insecure", "--partition", "x"), "--partition takes numbers"),
        (("client", "--server", "a:1", "--insecure", "--data", "digitz"), "did you mean 'digits'?"),
        (("client", "--server", "a:1", "--key", tmp_path / "no.key"), "cannot read the key"),
        (("client", "--server", "a:1", "--key", tmp_path / "clinic-a.key", "--ca", experiment), "cannot read the certificate"),
        (("client", "--server", "a:1", "--insecure", "--device", "tpu"), "device must be auto, cpu, cuda"),
        (("client", "--server", "a:1", "--insecure", "--epsilon", "-1"), "--epsilon -1"),
        (("client", "--server", "a:1", "--insecure", "--epsilon", "nan"), "--epsilon nan"),
        (("client", "--server", "a:1", "--insecure", "--delta", "0.9"), "--delta 0.9"),
        (("client", "--server", "a:1", "--insecure", "--patience", "-2"), "--patience -2"),
        (("client", "--server", "a:1", "--insecure", "--allow", "foo"), "PKG.MODULE:NAME"),
        (("client", "--server", "a:1", "--insecure", "--data", "folder:/no/such"), "there is no /no/such"),
        (("keys", "register", tmp_path / "clinic-a.pub", "--dir", tmp_path), "holds no authority"),
        (("keys", "init", experiment), "cannot make the folder"),
        (("keys", "init", folder, "--renew", "--host", ""), "--host ''"),
        (("keys", "init", tmp_path / "new", "--host", "bad name"), "--host 'bad name'"),
        (("keys", "init", tmp_path / "new", "--host", "ünï.example"), "--host 'ünï.example'"),
        (("keys", "init", tmp_path / "new", "--host", "a" * 64 + ".org"), "is neither an address nor a name"),
    ):
        code, out, err = fedrts(*arguments)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1
    assert not (tmp_path / "new").exists(), "what cannot be leaves nothing behind"
    authority = Authority(folder)
    key = serialization.load_pem_private_key(authority.server_key.read_bytes(), None)
    certificate = x509.load_pem_x509_certificate(authority.server_certificate.read_bytes())
    assert key.public_key() == certificate.public_key(), "a renewal that failed has changed nothing"


def test_signatures_are_not_remembered_for_long():
    """Every request has one of its own: a SuperLink that kept thousands would grow for hours."""
    private = ec.generate_private_key(ec.SECP256R1())
    public = private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    signature = private.sign(b"text", ec.ECDSA(hashes.SHA256()))
    assert _verified(public, b"text", signature)
    hits = _verified.cache_info().hits
    assert _verified(public, b"text", signature)
    assert _verified.cache_info().hits == hits + 1, "Flower asks the same once more"
    assert not any(_verified(public, b"%d" % number, signature) for number in range(500))
    assert _verified.cache_info().currsize < 300
