"""The server's end: its own SuperLink, a run in it, and messages to nodes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
from flwr.app import Message

import fedrts
from fedrts.errors import InputError, note, printable
from fedrts.flower import Say, superlink
from fedrts.flower.inside import (
    ACQUIRE,
    SERVER_OPTIONS,
    ControlHttpClient,
    Fab,
    HeartbeatSender,
    HttpGrid,
    NodeInfo,
    ObjectTree,
    RuntimeHttpClient,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
    TaskType,
    build_fab_from_files,
    control_pb2,
    fab_to_proto,
    make_pull_object_fn_protobuf,
    make_task_heartbeat_fn_http,
    message_pb2,
    run_from_proto,
    runtime_pb2,
    take_the_place,
)
from fedrts.flower.inside import grid as connected
from fedrts.flower.keys import Authority, trusting
from fedrts.flower.limits import REFUSED, is_loopback
from fedrts.flower.processes import child

_STARTING = 60.0
_LOST = 20.0
"""Seconds after which a SuperLink that does not answer is given up."""
_LONGEST_LOG = 16 * 2**20
"""Bytes of the SuperLink's log; then it is set aside, once, and begun anew."""

_APP = f"""
[project]
name = "fedrts-federation"
version = "{fedrts.__version__}"
[tool.flwr.app]
publisher = "fedrts"
[tool.flwr.app.components]
serverapp = "fedrts.flower.client_app:server"
clientapp = "fedrts.flower.client_app:app"
"""
"""All that travels as a Flower app: names of what is installed on both sides."""


@dataclass(frozen=True)
class Address:
    """The address at which nodes reach the server."""

    host: str
    port: int

    @staticmethod
    def of(text: str) -> Address:
        """Parse `HOST:PORT`."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError(f"an address is HOST:PORT, such as 0.0.0.0:9092, not '{text}'")
        return Address(host.strip("[]"), int(port))

    @staticmethod
    def free() -> Address:
        """Return a free port of this machine, for local use only."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Address("127.0.0.1", probe.getsockname()[1])

    @property
    def own(self) -> str:
        """The address at which this process itself reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


class Link:
    """Messages to and from nodes."""

    def __init__(self, grid: HttpGrid, client: RuntimeHttpClient, control: ControlHttpClient, run_id: int) -> None:
        self._grid, self._client, self._control = grid, client, control
        self._pull = make_pull_object_fn_protobuf(self._client.PullObject, grid.node, run_id)

    def nodes(self) -> dict[int, NodeInfo]:
        """Return the connected nodes, by number."""
        return {node.node_id: node for node in self._grid.get_nodes()}

    def push(self, message: Message) -> str | None:
        """Send a message; return its name, or None if its node is gone."""
        names = list(self._grid.push_messages([message]))
        return names[0] or None if names else None

    def replies(self, names: Sequence[str]) -> list[tuple[Any, ObjectTree]]:
        """Return the heads of replies to messages of these names, each once."""
        if not names:
            return []
        response = self._client.PullMessages(runtime_pb2.PullAppMessagesRequest(message_ids=list(names)))
        return list(zip(response.messages_list, response.message_object_trees, strict=True))

    def piece(self, name: str) -> bytes:
        """Return a piece of a reply; `ObjectUnavailableError` if it has not arrived yet."""
        return self._pull(name)

    def done_with(self, name: str) -> None:
        """Stop keeping a reply."""
        with contextlib.suppress(httpx.HTTPError):
            self._client.ConfirmMessageReceived(
                message_pb2.ConfirmMessageReceivedRequest(node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=name)
            )

    def register(self, public_key: bytes, name: str) -> int:
        """Admit the node with this key; an `InputError` if Flower refuses."""
        try:
            return int(self._control.RegisterNode(control_pb2.RegisterNodeRequest(public_key=public_key, name=name)).node_id)
        except httpx.HTTPStatusError as error:
            if error.response.status_code >= 500:
                raise
            raise InputError(
                f"Flower does not take its key ({printable(error.response.text)}); "
                "a key that was revoked while the server ran is taken again after the server's next start"
            ) from error

    def unregister(self, node: int) -> None:
        """Refuse a node from now on."""
        with contextlib.suppress(httpx.HTTPError):
            self._control.UnregisterNode(control_pb2.UnregisterNodeRequest(node_id=node))


@contextlib.contextmanager
def opened(address: Address, authority: Authority | None, log: Path | None, say: Say) -> Iterator[Link]:
    """Open a SuperLink at `address` with a run of ours; with an authority, behind TLS and for registered keys only."""
    if authority is None and not is_loopback(address.host):
        note(f"--insecure at {address.host}: whoever reaches this address can read everything and take part; use --tls DIR")
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedrts-superlink-")))
        os.environ["FLWR_HOME"] = str(home)
        secret = secrets.token_bytes(32)
        (home / "secret").touch(0o600)
        (home / "secret").write_bytes(secret)
        command = [sys.executable, "-m", superlink.__name__, "--host", address.host, "--port", str(address.port), *SERVER_OPTIONS]
        command += ["--superexec-auth-secret-file", str(home / "secret")]
        if authority is None:
            command.append("--insecure")
        else:
            files = {"ca-certfile": authority.certificate, "certfile": authority.server_certificate, "keyfile": authority.server_key}
            command += [part for name, file in files.items() for part in (f"--ssl-{name}", str(file))] + ["--enable-supernode-auth"]
        word = secrets.token_hex(16)
        environment = {superlink.CLOSED_UNTIL: str(home / "open"), superlink.NAME: word}
        process = stack.enter_context(child(command, environment, stdin=-3, stdout=-1, stderr=-2))
        assert process.stdout is not None
        tail: list[str] = []
        reader = threading.Thread(target=_relay, args=(process.stdout, log, tail, say), daemon=True)
        reader.start()
        certificate = None if authority is None else authority.certificate.read_bytes()
        _await(process, address, certificate, word, tail)
        yield _run(stack, address, certificate, secret)


def open_gate() -> None:
    """Admit nodes: their keys are registered now."""
    (Path(os.environ["FLWR_HOME"]) / "open").touch()


def _run(stack: contextlib.ExitStack, address: Address, certificate: bytes | None, secret: bytes) -> Link:
    """Start a run and take the place of its server app."""
    insecure, version = certificate is None, RuntimeVersionHttpInterceptor(component_name="fedrts")
    control = ControlHttpClient.from_server_address(address.own, insecure, certificate, interceptors=[version])
    stack.callback(control.close)
    fab = build_fab_from_files({"pyproject.toml": _APP.encode(), "README.md": b"fedrts"})[0]
    started = control.StartRun(control_pb2.StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))))
    signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE})
    with contextlib.closing(
        RuntimeHttpClient.from_server_address(address.own, insecure, certificate, interceptors=[version, signed])
    ) as ask:
        token = ask.AcquireTask(runtime_pb2.AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])).token
    if not token:
        raise InputError("the SuperLink gives this run to nobody: see superlink.log")
    grid, client = connected(address.own, insecure, certificate, token, _LOST)
    stack.callback(grid.close)
    heart = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heart.start()
    stack.callback(lambda: heart.stop() if heart.is_running else None)
    task = client.PullTaskInput(runtime_pb2.PullTaskInputRequest())
    take_the_place(task)
    grid.set_run(run_from_proto(task.run))
    return Link(grid, client, control, started.run_id)


def _await(process: Any, address: Address, certificate: bytes | None, word: str, tail: list[str]) -> None:
    """Wait until our SuperLink, and not another program at its address, answers."""
    due = time.monotonic() + _STARTING
    trusted = trusting(certificate) if certificate else False
    with httpx.Client(verify=trusted, trust_env=False) as probe:
        while time.monotonic() < due:
            if process.poll() is not None:
                time.sleep(0.2)  # its last words
                why = printable(tail[-1]) if tail else "it says nothing"
                raise InputError(f"the SuperLink at {address.own} did not start: {why}; choose another --address if this one is taken")
            try:
                if probe.get(f"{'https' if certificate else 'http'}://{address.own}/{word}").text == word:
                    return
            except httpx.TransportError as error:
                if "certificate verify failed" in str(error).lower():
                    host = address.own.rpartition(":")[0]
                    raise InputError(f"the server's certificate is not for {host}: `fedrts keys init … --renew --host {host}`") from error
            time.sleep(0.1)
    raise InputError(f"the SuperLink at {address.own} did not start within {_STARTING:.0f} seconds")


def _relay(stream: IO[bytes], log: Path | None, tail: list[str], say: Say) -> None:
    """Write all output of the SuperLink to the log, and pass refusals to the person who runs the server."""
    file = open(log or os.devnull, "ab", buffering=0)  # noqa: SIM115
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: file.close())
        for raw in stream:
            with contextlib.suppress(OSError):
                if log is not None and file.tell() + len(raw) > _LONGEST_LOG:
                    file.close()
                    os.replace(log, f"{log}.1")
                    file = open(log, "ab", buffering=0)  # noqa: SIM115
                file.write(raw)
            line = raw.decode("utf-8", "replace").strip()
            tail[:] = [*tail[-19:], line]
            if line.startswith(REFUSED):
                say(line)
