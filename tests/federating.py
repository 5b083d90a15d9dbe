"""Real processes on loopback: a server, nodes, a proxy that counts. Whatever still runs at the end is killed by its number."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

from fedrts.flower import keys, prepare
from fedrts.flower.host import ANY, Host, Limits

prepare()

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
EXPERIMENT = """
recipe = "paper"
data = "digits"
method = "fedrts"
rounds = 3
density = 0.3
clients = {total = 6, per_round = 4, partition = "iid"}
train = {epochs = 1}
topology = {interval = 2, end = 2}
engine = {wait = 90, timeout = 90}
"""
PATIENCE = 200.0
NO_LIMITS = ("--accept", ANY, "--min-samples", 1, "--min-batch", 1)
"""Options of a client whose consent is not under test."""


def trusting(**decided: Any) -> Host:
    """A host that consents to everything, and sets no limits but those given."""
    return Host(**{"accept": [ANY], "limits": Limits(1, 1, 0, 0), **decided})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """A process with what it has said so far."""

    def __init__(self, *arguments: object, typed: str | None = None, cwd: Path | None = None, **environment: str) -> None:
        """A command of ours by its arguments, or one line as it is `typed` into a shell."""
        command = [sys.executable, "-m", "fedrts", *map(str, arguments)] if typed is None else ["bash", "-c", typed]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env={**ENVIRONMENT, **environment},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.peak: list[str] = []
        """`VmHWM` of the process, the most memory that it held, as last looked at."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, words: str, seconds: float = PATIENCE) -> str:
        """The first line with these words."""
        due = time.monotonic() + seconds
        while time.monotonic() < due:
            for line in list(self.lines):
                if words in line:
                    return line
            assert self.process.poll() is None, f"ended with {self.process.returncode} before '{words}':\n{self.text}"
            time.sleep(0.05)
        raise AssertionError(f"'{words}' did not come within {seconds:.0f} s:\n{self.text}")

    def ended(self, seconds: float = PATIENCE) -> int:
        due = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < due:
            with contextlib.suppress(OSError):
                self.peak += [line for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if "VmHWM" in line]
            time.sleep(0.1)
        code = self.process.wait(1)
        self._reader.join(5)
        return code

    def kill(self, how: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(how)

    def descendants(self) -> set[int]:
        """Numbers of all processes below this one."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found - {self.process.pid}


@contextlib.contextmanager
def processes() -> Iterator[Callable[..., Running]]:
    """`start("server", …)` starts a command of ours."""
    started: list[Running] = []

    def start(*arguments: object, cwd: Path | None = None, **environment: str) -> Running:
        started.append(Running(*arguments, cwd=cwd, **environment))
        return started[-1]

    try:
        yield start
    finally:
        for running in started:
            running.kill(signal.SIGCONT)
            running.kill(signal.SIGTERM)
        for running in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(10)
            running.kill()
            running.process.wait(10)


class Folder:
    """Keys of a federation and its experiment."""

    def __init__(self, path: Path, nodes: int = 3, experiment: str = EXPERIMENT) -> None:
        self.path = path
        self.authority = keys.Authority(path / "authority")
        self.authority.init([])
        self.keys = []
        for number in range(nodes):
            private, public = keys.issue(f"site-{number}", path / "keys")
            self.authority.register(public)
            self.keys.append(private)
        self.experiment = path / "experiment.toml"
        self.experiment.write_text(experiment)
        self.port = free_port()

    def server(self, out: object = "run", port: int | None = None) -> list[object]:
        address = f"127.0.0.1:{port or self.port}"
        return ["server", self.experiment, "--address", address, "--tls", self.authority.folder, "--out", self.path / str(out)]

    def bind(self, number: int, clients: list[int]) -> None:
        """Let this node, and no other, stand for these clients."""
        self.authority.register(self.keys[number].with_suffix(".pub"), clients=clients)

    def site(self, number: int, port: int | None = None) -> list[object]:
        """The command of a node; without --partition one with data of its own."""
        ca = self.authority.certificate
        return ["client", "--server", f"127.0.0.1:{port or self.port}", "--key", self.keys[number], "--ca", ca, *NO_LIMITS]

    def client(self, number: int, clients: str, port: int | None = None) -> list[object]:
        """The command of a node that stands for these clients, which are bound to its key."""
        self.bind(number, [int(client) for client in clients.split(",")])
        return [*self.site(number, port), "--partition", clients]


class CountingProxy:
    """Passes connections on to a port, and counts the bytes both ways."""

    def __init__(self, target: int) -> None:
        self.target, self.up, self.down = target, 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._stopped = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._stopped:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(near,), daemon=True).start()

    def _pass_on(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self.target), 10)
        except OSError:
            near.close()
            return
        with near, far, selectors.DefaultSelector() as selector, contextlib.suppress(OSError):
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while not self._stopped:
                for key, _ in selector.select(0.5):
                    data = key.fileobj.recv(2**16)  # type: ignore[union-attr]
                    if not data:
                        return
                    if key.fileobj is near:
                        self.up += len(data)
                    else:
                        self.down += len(data)
                    key.data.sendall(data)

    def close(self) -> None:
        self._stopped = True
        self._listener.close()


@contextlib.contextmanager
def nginx(folder: Folder) -> Iterator[int]:
    """The port of a real nginx, with the configuration that we ship, in front of the folder's server."""
    front = free_port()
    text = (Path(__file__).parents[1] / "deploy" / "nginx.conf").read_text()
    here = {"/etc/fedrts": str(folder.authority.folder), "127.0.0.1:9092": f"127.0.0.1:{folder.port}", "8443": str(front)}
    for word, value in here.items():
        assert word in text
        text = text.replace(word, value)
    place = folder.path / "nginx"
    place.mkdir()
    around = f"daemon off;\npid {place}/pid;\nerror_log {place}/error.log;\nevents {{}}\nhttp {{\naccess_log off;\n{text}\n}}\n"
    (place / "nginx.conf").write_text(around)
    process = subprocess.Popen(["nginx", "-p", str(place), "-c", str(place / "nginx.conf")])
    try:
        listening(front)
        yield front
    finally:
        process.terminate()
        process.wait(20)


def listening(port: int, seconds: float = 20.0) -> None:
    """Wait until somebody listens on a port of this machine."""
    due = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > due:
                raise
            time.sleep(0.05)


def speaks(folder: Folder, port: int, version: ssl.TLSVersion) -> bool:
    """Does somebody who knows no newer TLS than this get a connection?"""
    context = ssl.create_default_context(cafile=str(folder.authority.certificate))
    context.maximum_version = version
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        try:
            context.wrap_socket(plain, server_hostname="localhost").close()
        except ssl.SSLError:
            return False
    return True


def status(folder: Folder, port: int, path: str) -> int:
    """What a stranger who trusts the authority is answered at a path."""
    context = ssl.create_default_context(cafile=str(folder.authority.certificate))
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
