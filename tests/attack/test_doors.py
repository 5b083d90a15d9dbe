"""Strangers at the server's door: nothing of theirs is read, held, or written down without end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import io
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

import flwr.app.message.message as flower_messages
import flwr.supernode.node_auth_http_interceptor as flower_signatures
import uvicorn
from flwr.app import Message
from flwr.supercore.primitives.asymmetric import sign_message

from federating import free_port, listening, trusting
from fedrts.errors import InputError, Note
from fedrts.flower import HELLO, keys, limits, link, node, punctual, superlink
from fedrts.flower.fleet import Fleet
from fedrts.flower.keys import Authority
from fedrts.flower.link import Address, Link, open_gate, opened
from fedrts.flower.messages import content
from fedrts.flower.node import Connection, Server, serve
from fedrts.flower.roster import Roster

PUSH = "/v1/fleet/push-object"
MiB = 2**20


@pytest.fixture(autouse=True)
def _nothing_said_before() -> None:
    limits.refused.sum_up()


def later(seconds: float) -> Callable[[], datetime.datetime]:
    """A clock that is ahead by so much."""
    return lambda: datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)


# The gate, in this process.


class Node:
    """A key, and requests that are signed with it."""

    def __init__(self) -> None:
        self.private = keys._new_key()
        self.public = keys._public(self.private.public_key())

    def headers(self, clock: float = 0.0, **other: bytes) -> dict[bytes, bytes]:
        stamp = later(clock)().isoformat().encode()
        signed = {b"flwr-public-key": self.public, b"flwr-signature": sign_message(self.private, stamp)}
        given = {name.replace("_", "-").encode(): value for name, value in other.items()}
        return {name: base64.b64encode(value) for name, value in (signed | given).items()} | {b"flwr-timestamp": stamp}


class Asked:
    """One request: what became of it."""

    def __init__(self, headers: dict[bytes, bytes], body: Any = b"body", path: str = PUSH, peer: str = "10.1.2.3", **gate: Any) -> None:
        self.read = self.status = 0
        self.said, self.passed = b"", b""
        self._body = body
        size = str(len(body) if isinstance(body, bytes) else 9 * MiB).encode()
        scope: dict[str, Any] = {"type": "http", "path": path, "client": (peer, 1), "server": ("10.9.9.9", 9092)}
        scope["headers"] = [*headers.items(), (b"content-length", size)]
        asyncio.run(superlink.Gate(self._app, **gate)(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        self.read += 1
        if isinstance(self._body, bytes):
            return {"type": "http.request", "body": self._body}
        await asyncio.sleep(self._body)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def _send(self, event: Any) -> None:
        self.status = event.get("status", self.status)
        self.said += event.get("body", b"")

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def test_key_and_signature_are_checked_before_a_byte_of_the_body_is_read():
    member, other = Node(), Node()
    registered = {member.public}.__contains__
    unsigned = member.headers()
    del unsigned[b"flwr-signature"]
    for headers, status in (
        ({}, 401),
        (unsigned, 401),
        (member.headers() | {b"flwr-public-key": b"not base64!"}, 401),
        (member.headers() | {b"flwr-timestamp": b"yesterday"}, 401),
        (member.headers() | {b"flwr-timestamp": b"2026-01-01T00:00:00"}, 401),  # without its zone
        (member.headers() | {b"flwr-timestamp": b"0001-01-01T00:00:00+14:00"}, 401),  # before all time
        (other.headers(), 403),
        (other.headers(flwr_public_key=member.public), 401),  # whose key is no secret
        (member.headers(flwr_signature=b"nonsense"), 401),
    ):
        asked = Asked(headers, registered=registered)
        assert (asked.status, asked.read, asked.passed) == (status, 0, b""), asked.said
    asked = Asked(member.headers(), registered=registered)
    assert (asked.status, asked.passed) == (200, b"body")
    assert Asked({}).status == 200, "without keys only the limits hold"


def test_who_brings_no_key_is_told_so_before_its_request_is_read():
    asked = Asked(Node().headers(), path="/v1/fleet/register-node", registered=lambda key: False)
    assert (asked.status, asked.read) == (403, 0)
    assert b"must be registered" in asked.said


@pytest.mark.parametrize("seconds", [-290, -60, 60, 290])
def test_clocks_may_differ_either_way(seconds: float):
    member = Node()
    assert Asked(member.headers(clock=seconds), registered=lambda key: True).status == 200


@pytest.mark.parametrize("seconds", [-310, 310])
def test_clocks_that_differ_by_more_are_both_told(seconds: float, capfd: pytest.CaptureFixture[str]):
    asked = Asked(Node().headers(clock=seconds), registered=lambda key: True)
    assert (asked.status, asked.read) == (401, 0)
    for moment in (later(seconds)(), later(0)()):
        assert f"{moment:%Y-%m-%d %H:%M}".encode() in asked.said
    assert b"set the clock" in asked.said
    assert "set the clock" in capfd.readouterr().out


@pytest.mark.parametrize(("stalled", "whole", "pause"), [(0.05, 9.0, 5.0), (9.0, 0.2, 0.01)])
def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch, stalled: float, whole: float, pause: float):
    monkeypatch.setattr(superlink, "STALLED", stalled)
    monkeypatch.setattr(superlink, "WHOLE", whole)
    started = time.monotonic()
    asked = Asked({}, body=pause)
    assert (asked.status, asked.passed) == (408, b"")
    assert time.monotonic() - started < 3


def test_bytes_in_memory_are_limited_in_all_and_for_each_node():
    async def play() -> None:
        budget = limits.Budget(total=10 * MiB, each=4 * MiB, patience=0.1)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(budget.held("a", 3 * MiB))
            with pytest.raises(limits.CrowdedError):
                await stack.enter_async_context(budget.held("a", 3 * MiB))
            async with budget.held("b", 4 * MiB), budget.held("a", 1000):
                waiting = asyncio.create_task(stack.enter_async_context(budget.held("c", 4 * MiB)))
                await asyncio.sleep(0.02)
                assert not waiting.done(), "11 of 10 MiB"
            await waiting
            assert budget.used == 7 * MiB
        async with budget.held("d", 99 * MiB):
            assert budget.used == 99 * MiB, "alone anything that the gate takes has its turn"
        assert budget.used == 0
        assert not budget._of

    asyncio.run(play())


def test_a_request_whose_turn_does_not_come_is_not_read():
    budget = limits.Budget(total=MiB, patience=0.05)
    budget.used = MiB
    asked = Asked({}, body=bytes(MiB), budget=budget)
    assert (asked.status, asked.read) == (503, 0)


class Closable:
    closed = False

    def shutdown(self, how: int) -> None:
        self.closed = True


def test_strangers_crowd_out_each_other_and_never_nodes():
    connections = limits.Connections(strangers=3, each=2, most=100)
    sockets: dict[limits.Peer, Any] = {}

    def come(host: str, port: int) -> bool:
        sockets[host, port] = Closable()
        return connections.come((host, port), sockets[host, port])

    assert come("10.0.0.1", 1)
    assert connections.known(("10.0.0.1", 1), "a node's key")
    assert come("10.0.0.2", 1)
    assert come("10.0.0.2", 2)
    assert not come("10.0.0.2", 3), "two of one address are enough"
    assert come("2001:db8::1", 1)
    assert come("2001:db8::2", 1)
    assert not come("2001:db8::3", 1), "one network"
    assert [peer for peer, socket in sockets.items() if socket.closed] == [("10.0.0.2", 1)], "the oldest made room"
    connections.gone(("10.0.0.2", 1))
    connections.gone(("10.0.0.2", 2))
    assert come("10.0.0.2", 4)
    for port in range(2, 5):
        assert come("10.0.0.1", port)
        assert connections.known(("10.0.0.1", port), "a node's key") == (port == 2)
        connections.gone(("10.0.0.1", port)) if port > 2 else None
    assert not sockets["10.0.0.1", 1].closed
    assert all(come("127.0.0.1", port) for port in range(9)), "a proxy stands for many"


def test_refusals_fill_neither_screen_nor_log():
    said: list[str] = []
    refused = limits.Refusals(said.append, most=20, seconds=600)
    for number in range(1000):
        refused("10.0.0.1", "401", f"10.0.0.1 at /v1/fleet/{number}: no key")
        refused(f"10.1.{number // 200}.{number % 200}", "401", "another address")
    assert len(said) == 20
    refused.sum_up()
    assert "10.0.0.1: … and 999 more (401)" in said
    assert said[-1] == "… and 981 more from other addresses"
    refused("10.0.0.1", "401", "again")
    assert said[-1] == "again"
    refused.sum_up()
    soon = limits.Refusals(said.append, seconds=0.1)
    soon("10.0.0.1", "401", "once")
    soon("10.0.0.1", "401", "twice")
    due = time.monotonic() + 5
    while said[-1] == "once" and time.monotonic() < due:
        time.sleep(0.02)
    assert said[-1] == "10.0.0.1: … and 1 more (401)", "by itself, when the minute is over"


def test_the_log_of_the_superlink_is_set_aside_when_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "_LONGEST_LOG", 1000)
    log = tmp_path / "superlink.log"
    shown: list[str] = []
    link._relay(io.BytesIO(b"refused: somebody\n" * 500), log, [], shown.append)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert set(sizes) == {"superlink.log", "superlink.log.1"}
    assert max(sizes.values()) <= 1000
    assert len(shown) == 500, "what the SuperLink says is bounded already"


# Connections that dawdle, with a real server in a thread.


@contextlib.contextmanager
def punctual_server(authority: Authority | None = None) -> Iterator[int]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert scope[limits.CONNECTION] == scope["client"]
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    tls: dict[str, Any] = {}
    if authority is not None:
        files = {"ssl_certfile": authority.server_certificate, "ssl_keyfile": authority.server_key}
        tls = files | {"ssl_context_factory": superlink._newest_tls}
    config = uvicorn.Config(
        app, loop="fedrts.flower.punctual:Loop", http=punctual.Punctual, ws="none", lifespan="off", log_level="error", **tls
    )
    server, port = uvicorn.Server(config), free_port()
    listeners = limits.Listener.at("127.0.0.1", port, limits.Connections())
    thread = threading.Thread(target=server.run, kwargs={"sockets": listeners}, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(10)
        assert not listeners[0].connections.owners


def closed_after(connection: socket.socket, most: float = 5.0) -> float:
    """Seconds until the other end closes."""
    started = time.monotonic()
    connection.settimeout(most)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while connection.recv(2**16):
            pass
    return time.monotonic() - started


def test_slow_heads_long_heads_and_idle_handshakes_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(punctual, "_HEAD", 0.3)
    monkeypatch.setattr(punctual, "_HANDSHAKE", 0.3)
    with punctual_server() as port:
        listening(port)

        def connected() -> socket.socket:
            return socket.create_connection(("127.0.0.1", port))

        with connected() as silent:
            assert closed_after(silent) < 3
        with connected() as slow:
            slow.sendall(b"POST / HTTP/1.1\r\nhost: here\r\nlong: ")
            assert closed_after(slow) < 3
        with connected() as second:  # a good request, and then half of one
            second.sendall(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
            assert b"200" in second.recv(1000)
            second.sendall(b"GET / HTTP/1.1\r\nho")
            assert closed_after(second) < 3
        monkeypatch.setattr(punctual, "_HEAD", 60.0)
        with connected() as long, contextlib.suppress(ConnectionError):
            long.sendall(b"GET / HTTP/1.1\r\nlong: " + b"x" * 200_000)
            assert closed_after(long) < 3
    authority = Authority(tmp_path / "authority")
    authority.init([])
    with punctual_server(authority) as port, socket.create_connection(("127.0.0.1", port)) as idle:
        assert closed_after(idle) < 3


# Keys and certificates.


def copied(authority: Authority, tmp_path: Path) -> None:
    """Three nodes' files: a good one, a copy of it, and half of another."""
    authority.init([])
    _, public = keys.issue("clinic-a", tmp_path)
    _, other = keys.issue("clinic-c", tmp_path)
    authority.register(public)
    (authority.nodes / "clinic-b.pub").write_bytes(public.read_bytes())
    (authority.nodes / "clinic-c.pub").write_bytes(other.read_bytes()[:100])


class Registry:
    """A link that lets keys in; Flower takes each one once."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def register(self, key: bytes, name: str) -> int:
        if key in self.taken:
            raise InputError("already in use")
        self.taken.append(key)
        return len(self.taken)

    def unregister(self, number: int) -> None:
        pass


def test_a_truncated_or_doubled_key_is_skipped_and_named_once(tmp_path: Path):
    authority, registry = Authority(tmp_path / "authority"), Registry()
    said: list[str] = []
    copied(authority, tmp_path)
    fleet = Fleet(registry, {}, Roster(2), None, "", authority, said.append)  # type: ignore[arg-type]
    for _ in range(3):
        fleet.follow_keys()
    assert registry.taken == [(tmp_path / "clinic-a.pub").read_bytes()]
    assert len(said) == 2
    assert "clinic-b.pub holds the key of 'clinic-a'" in said[0]
    assert "cannot read the public key" in said[1]
    assert "clinic-c.pub" in said[1]
    authority.register(tmp_path / "clinic-c.pub")  # the remedy
    fleet.follow_keys()
    assert len(registry.taken) == 2
    (authority.nodes / "clinic-a.pub").write_bytes(b"-----BEGIN")
    (authority.nodes / "clinic-b.pub").unlink()
    fleet.follow_keys()
    assert not any("revoked" in line for line in said), "a damaged file takes nobody's permission away"


def test_a_key_that_flower_does_not_take_again_does_not_end_the_server(tmp_path: Path):
    authority, registry = Authority(tmp_path / "authority"), Registry()
    said: list[str] = []
    authority.init([])
    _, public = keys.issue("clinic-a", tmp_path)
    authority.register(public)
    fleet = Fleet(registry, {}, Roster(2), None, "", authority, said.append)  # type: ignore[arg-type]
    fleet.follow_keys()
    authority.revoke("clinic-a")
    fleet.follow_keys()
    authority.register(public)
    fleet.follow_keys()
    fleet.follow_keys()
    assert [line for line in said if "skipped" in line] == ["skipped: the key of 'clinic-a': already in use"]


@contextlib.contextmanager
def at(monkeypatch: pytest.MonkeyPatch, days: float) -> Iterator[None]:
    """What certificates are made of, on another day."""

    class Then(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.now(tz) + datetime.timedelta(days=days)

    with monkeypatch.context() as patched:
        patched.setattr(keys, "datetime", SimpleNamespace(datetime=Then, timedelta=datetime.timedelta, UTC=datetime.UTC))
        yield


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("doors") / "authority")
    authority.init([])
    return authority


@pytest.mark.parametrize(("days", "words"), [(-900, "expired on 20"), (900, "is not valid before 20")])
def test_a_server_does_not_start_with_a_certificate_that_is_not_valid_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, words: str
):
    authority = Authority(tmp_path / "authority")
    authority.init([])
    with at(monkeypatch, days):
        authority.renew(["fl.example.org"])
    with pytest.raises(InputError, match=words) as caught:
        authority.checked()
    assert "--renew --host fl.example.org`" in str(caught.value)
    authority.renew([])
    authority.checked()


def test_a_certificate_that_expires_soon_is_worth_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    authority = Authority(tmp_path / "authority")
    authority.init([])
    with at(monkeypatch, -800):
        authority.renew([])
    with pytest.warns(Note, match=r"server\.pem expires on .*--renew` makes a new one"):
        authority.checked()


@contextlib.contextmanager
def handshakes(certificate: Path, key: Path, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> Iterator[str]:
    """The address of a server that does nothing but shake hands."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.maximum_version = newest
    listener = socket.create_server(("127.0.0.1", 0))

    def shake() -> None:
        while True:
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                context.wrap_socket(connection, server_side=True).close()

    threading.Thread(target=shake, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def told(server: Server, patience: float = 0.0, lines: list[str] | None = None) -> str:
    """Why a node gives up."""
    with pytest.raises(InputError) as caught:
        serve(trusting(clients=[0]), server, (lines if lines is not None else []).append, patience)
    return str(caught.value)


@pytest.mark.parametrize(("days", "words"), [(-900, "expired on 20"), (900, "is not valid before 20")])
def test_a_node_calls_a_certificate_expired_that_is(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, words: str
):
    mine = keys.issue("clinic", tmp_path)[0]
    own = tmp_path / "own"
    own.mkdir()
    for name in ("ca.key", "ca.pem"):
        (own / name).write_bytes((authority.folder / name).read_bytes())
    with at(monkeypatch, days):
        Authority(own).renew([])
    with handshakes(own / "server.pem", own / "server.key") as address:
        why = told(Server(address, mine, authority.certificate))
    assert words in why
    assert "this machine's clock says" in why
    assert "vouches" not in why
    with at(monkeypatch, 10 * days):
        Authority(tmp_path / "old").init([])
    with handshakes(tmp_path / "old" / "server.pem", tmp_path / "old" / "server.key") as address:
        why = told(Server(address, mine, tmp_path / "old" / "ca.pem"))
        assert "ca.pem" in why, "which the site keeps"
        assert words in why
        assert "is not who --ca vouches for" in told(Server(address, mine, authority.certificate)), "a stranger's, whatever its date"


def test_a_node_speaks_tls_1_3_only(authority: Authority, tmp_path: Path):
    mine = keys.issue("clinic", tmp_path)[0]
    with handshakes(authority.server_certificate, authority.server_key, ssl.TLSVersion.TLSv1_2) as address:
        lines: list[str] = []
        assert "could not be reached" in told(Server(address, mine, authority.certificate), lines=lines)
    assert "VERSION" in lines[0]
    assert keys.trusting(None).minimum_version == ssl.TLSVersion.TLSv1_3


def test_without_encryption_beyond_this_machine_there_is_a_warning(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder):
    def nothing(*_: object, **__: object) -> Any:
        raise ConnectionError

    monkeypatch.setattr(link, "child", nothing)
    monkeypatch.setattr(node, "Connection", nothing)

    def begin(host: str) -> None:
        with pytest.raises(ConnectionError), opened(Address(host, 9), None, None, print):
            pass
        told(Server(f"{host}:9", insecure=True))

    for near in ("127.0.0.1", "localhost", "::1"):
        begin(near)
    assert not recwarn.list
    begin("0.0.0.0")
    assert ["--insecure" in str(warning.message) for warning in recwarn.list] == [True, True]


# A real SuperLink in a process of its own.


class Door:
    """A SuperLink with one registered node."""

    def __init__(self, link: Link, address: Address, authority: Authority, key: Path, said: list[str]) -> None:
        self.link, self.address, self.authority, self.key, self.said = link, address, authority, key, said
        mine = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(entry) == os.getpid()]
        (self.process,) = (entry for entry in mine if superlink.__name__.encode() in (entry / "cmdline").read_bytes())

    @property
    def megabytes(self) -> float:
        (line,) = (line for line in (self.process / "status").read_text().splitlines() if "VmHWM" in line)
        return int(line.split()[1]) / 1024

    @property
    def server(self) -> Server:
        return Server(self.address.own, self.key, self.authority.certificate)

    def connection(self) -> Connection:
        private = self.server.private_key()
        assert private is not None
        return Connection(self.server, (private, private.public_key()), registered=True)

    def stranger(self, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        context.maximum_version = newest
        return context.wrap_socket(socket.create_connection((self.address.host, self.address.port), 10), server_hostname="localhost")


def _parent(entry: Path) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return -1


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("superlink")
    said: list[str] = []
    private, public = keys.issue("clinic", folder)
    address = Address.free()
    with opened(address, authority, folder / "superlink.log", said.append) as linked:
        linked.register(public.read_bytes(), "clinic")
        open_gate()
        yield Door(linked, address, authority, private, said)


def test_sixty_strangers_with_large_bodies_fill_no_memory(door: Door):
    head = f"POST {PUSH} HTTP/1.1\r\nhost: here\r\ncontent-type: application/protobuf\r\ncontent-length: {15 * MiB}\r\n\r\n"
    before, answers = door.megabytes, []

    def attack() -> None:
        with door.stranger() as connection:
            connection.sendall(head.encode())
            with contextlib.suppress(OSError):
                for _ in range(15 * 16 - 1):  # all but the last piece: it stays half sent
                    connection.sendall(bytes(2**16))
            connection.settimeout(3)
            with contextlib.suppress(OSError):
                answers.append(connection.recv(100))

    attackers = [threading.Thread(target=attack) for _ in range(60)]
    for attacker in attackers:
        attacker.start()
    for attacker in attackers:
        attacker.join(60)
    assert door.megabytes - before < 100, "it was 850 before key and signature came first"
    assert sum("no key and signature" in line for line in door.said) == 1
    with door.connection():
        pass  # and a node comes in


def test_the_server_speaks_tls_1_3_only(door: Door):
    with pytest.raises(ssl.SSLError):
        door.stranger(ssl.TLSVersion.TLSv1_2)
    with door.stranger() as connection:
        assert connection.version() == "TLSv1.3"
    due = time.monotonic() + 10
    while not (said := any("UNSUPPORTED_PROTOCOL" in line for line in door.said)) and time.monotonic() < due:
        time.sleep(0.05)
    assert said, door.said


@pytest.mark.parametrize("seconds", [-60, 60, 250])
def test_a_node_whose_clock_is_off_takes_part(door: Door, monkeypatch: pytest.MonkeyPatch, seconds: float):
    monkeypatch.setattr(flower_signatures, "now", later(seconds))
    with door.connection() as connection:
        order = door.link.push(Message(content({"question": 1}), connection.node.node_id, HELLO, ttl=100))
        assert order is not None

        def answer(message: Message) -> Message:
            with monkeypatch.context() as ours:
                ours.setattr(flower_messages, "now", later(seconds))
                return Message(content({"answer": 2}), reply_to=message)

        assert connection.handle(answer)
        ((head, _),) = door.link.replies([order])
        assert not head.HasField("error")


@pytest.mark.parametrize("seconds", [-400, 400])
def test_a_node_whose_clock_is_wrong_is_told_both_times(door: Door, monkeypatch: pytest.MonkeyPatch, seconds: float):
    monkeypatch.setattr(flower_signatures, "now", later(seconds))
    why = told(door.server)
    assert "refuses this node: the node's clock says" in why
    assert f"{later(0)():%Y-%m-%d %H:}" in why
    assert "set the clock" in why


def test_a_key_that_was_revoked_is_no_key_any_more(door: Door, tmp_path: Path):
    private, public = keys.issue("leaving", tmp_path)
    number = door.link.register(public.read_bytes(), "leaving")
    leaving = Door.__new__(Door)
    leaving.__dict__ |= door.__dict__ | {"key": private}
    with leaving.connection():
        door.link.unregister(number)
    assert "not registered, or was revoked" in told(leaving.server)
    with pytest.raises(InputError, match="next start"):
        door.link.register(public.read_bytes(), "leaving")
