"""Limits on connections, on bytes held at once, and on log lines about refusals."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fedrts.errors import printable

STRANGERS = 512
"""Connections that have not shown a registered key yet; one more, and the oldest is closed."""
EACH = 64
"""Connections of one key, or of one address without a key; a node has about four."""
_SPARE = 256
"""Files that are no connections."""
AT_ONCE = 64 * 2**20
"""Bytes of requests of one node that are in memory at once; a node sends two pieces of 5 MiB side by side."""
SMALL = 2**16
"""Bytes of a request that waits for nobody, such as a heartbeat."""
PATIENCE = 25.0
"""Seconds that a request waits for its turn; nodes give up after 30."""

REFUSED = "refused: "
"""How a line begins that the server passes on to the person who runs it."""

CONNECTION = "fedrts.connection"
"""The key of a request's scope under which the other end of its connection is, also where a proxy speaks for another."""

Peer = tuple[str, int]
"""Address and port of the other end of a connection."""


def is_loopback(host: str) -> bool:
    """Whether this address or name stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def memory_at_once() -> int:
    """Return the bytes of all requests that may be in memory at once: a quarter of the machine's memory."""
    return max(4 * AT_ONCE, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


class Refusals:
    """Report who was refused and why: each once a minute, at most `most` a minute; the rest is counted."""

    def __init__(self, say: Callable[[str], None], most: int = 20, seconds: float = 60.0) -> None:
        self.say, self.most, self.seconds = say, most, seconds
        self._repeated: dict[tuple[str, str], int] = {}
        self._others = 0
        self._end: threading.Timer | None = None
        self._lock = threading.Lock()

    def __call__(self, peer: str, kind: str, text: str) -> None:
        """Report a refusal; `kind` is the reason without the parts that a peer may choose freely."""
        with self._lock:
            if self._end is None:
                self._end = threading.Timer(self.seconds, self.sum_up)
                self._end.daemon = True
                self._end.start()
            if (peer, kind) in self._repeated:
                self._repeated[peer, kind] += 1
            elif len(self._repeated) < self.most:
                self._repeated[peer, kind] = 0
                self.say(text)
            else:
                self._others += 1

    def sum_up(self) -> None:
        """Report what was left out, and start over; called at the end of a minute."""
        with self._lock:
            for (peer, kind), more in self._repeated.items():
                if more:
                    self.say(f"{peer or 'somebody'}: … and {more:,} more ({kind})")
            if self._others:
                self.say(f"… and {self._others:,} more from other addresses")
            if self._end is not None:
                self._end.cancel()
            self._repeated, self._others, self._end = {}, 0, None


def _print(text: str) -> None:
    print(REFUSED + printable(" ".join(text.split()), 1000), flush=True)


refused = Refusals(_print)
"""For the whole process."""


class Connections:
    """Current connections. Everyone is a stranger until a request shows a registered key; strangers never crowd out nodes."""

    def __init__(self, strangers: int = STRANGERS, each: int = EACH, most: int = 2**16) -> None:
        self.most_strangers, self.each, self.most = strangers, each, most
        self.strangers: OrderedDict[Peer, socket.socket] = OrderedDict()
        self.owners: dict[Peer, str] = {}
        self._counts: Counter[str] = Counter()

    def come(self, peer: Peer, connection: socket.socket) -> bool:
        """Register a connection before its first byte; false if there are too many."""
        owner = neighbourhood(peer[0])
        if not self._has_room(owner):
            refused(owner, "connections", f"{owner}: more than {self.each} connections without a registered key")
            return False
        while self.strangers and (len(self.strangers) >= self.most_strangers or len(self.owners) >= self.most):
            oldest, evicted = self.strangers.popitem(last=False)
            refused("", "crowd", f"{oldest[0]}: closed, because {self.most_strangers} connections show no registered key")
            with contextlib.suppress(OSError):
                evicted.shutdown(socket.SHUT_RDWR)
        if len(self.owners) >= self.most:
            refused("", "full", f"{owner}: {self.most} connections are open, and this machine takes no more")
            return False
        self.strangers[peer] = connection
        self._belongs(peer, owner)
        return True

    def known(self, peer: Peer, owner: str) -> bool:
        """Move a connection from strangers to its owner; false if the owner has too many."""
        before = self.owners.get(peer)
        if before is not None and before != owner:
            if not self._has_room(owner):
                return False
            self._belongs(peer, owner)
        self.strangers.pop(peer, None)
        return True

    def gone(self, peer: Peer) -> None:
        """Remove a connection that has ended."""
        self.strangers.pop(peer, None)
        if (owner := self.owners.pop(peer, None)) is not None:
            self._less(owner)

    def _has_room(self, owner: str) -> bool:
        return self._counts[owner] < self.each or is_loopback(owner)  # where a proxy, or we ourselves, stand for many

    def _belongs(self, peer: Peer, owner: str) -> None:
        if (before := self.owners.get(peer)) is not None:
            self._less(before)
        self.owners[peer] = owner
        self._counts[owner] += 1

    def _less(self, owner: str) -> None:
        self._counts[owner] -= 1
        if self._counts[owner] <= 0:
            del self._counts[owner]


def neighbourhood(host: str) -> str:
    """Return an address or, for IPv6, the network that its owner controls."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4 or address.is_loopback:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False))


class Listener(socket.socket):
    """A listening socket that counts its connections from the first moment, before any encryption."""

    connections: Connections

    @staticmethod
    def at(host: str, port: int, connections: Connections) -> list[Listener]:
        """Return sockets for all addresses of this host."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listeners = []
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            listener = Listener(fileno=socket.create_server(address[:2], family=family, backlog=2048).detach())
            listener.connections = connections
            listeners.append(listener)
        return listeners

    def accept(self) -> tuple[socket.socket, Any]:
        plain, address = super().accept()
        accepted = _AcceptedSocket(plain.family, plain.type, plain.proto, plain.detach())
        if not self.connections.come(address[:2], accepted):
            accepted.close()
            raise ConnectionAbortedError
        accepted.listing = (self.connections, address[:2])
        return accepted, address


class _AcceptedSocket(socket.socket):
    """A connection that is counted until it is closed."""

    listing: tuple[Connections, Peer] | None = None

    def close(self) -> None:
        if self.listing is not None:
            connections, peer = self.listing
            self.listing = None
            connections.gone(peer)
        super().close()


def most_connections() -> int:
    """Return the number of connections that this process may open, after raising it to the machine's limit."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**16 if most == resource.RLIM_INFINITY else min(most, 2**16)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE, _SPARE)


@dataclass
class _Waiting:
    owner: str
    size: int
    turn: asyncio.Future[None]


class CrowdedError(Exception):
    """A request had to wait too long."""


class Budget:
    """Bytes of requests in memory at once, in total and per owner; later requests wait."""

    def __init__(self, total: int, each: int = AT_ONCE, patience: float = PATIENCE) -> None:
        self.total, self.each, self.patience = total, each, patience
        self.used = 0
        self._of: Counter[str] = Counter()
        self._queue: deque[_Waiting] = deque()

    @contextlib.asynccontextmanager
    async def held(self, owner: str, size: int) -> AsyncIterator[None]:
        """Hold this many bytes during the block; `CrowdedError` after too long a wait."""
        if size <= SMALL:
            yield
            return
        waiting = _Waiting(owner, size, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._call()
        try:
            await self._turn(waiting)
            yield
        finally:
            if waiting in self._queue:
                self._queue.remove(waiting)
            else:
                self.used -= size
                self._of[owner] -= size
                if self._of[owner] <= 0:
                    del self._of[owner]
            self._call()

    async def _turn(self, waiting: _Waiting) -> None:
        try:
            await asyncio.wait_for(waiting.turn, self.patience)
        except TimeoutError as error:
            raise CrowdedError from error

    def _call(self) -> None:
        """Serve the first in the queue, skipping those whose owner holds enough already."""
        for waiting in list(self._queue):
            if self._of[waiting.owner] and self._of[waiting.owner] + waiting.size > self.each and not is_loopback(waiting.owner):
                continue
            if self.used and self.used + waiting.size > self.total:
                return
            self._queue.remove(waiting)
            self.used += waiting.size
            self._of[waiting.owner] += waiting.size
            if not waiting.turn.done():
                waiting.turn.set_result(None)
