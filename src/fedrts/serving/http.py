"""GET over HTTP/1.1, one request per connection, in a thread of its own: for metrics and pages.

A request has a few seconds and 16 KiB; its body is never read; the number of connections at once is limited.

    with serving(Endpoint("127.0.0.1", 9464), lambda request: Answer(200, b"hello")) as at:
        print(at.url)
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qs, unquote, urlsplit

from fedrts.errors import InputError

LONGEST = 2**14
"""Bytes of the head of a request."""
SECONDS = 5.0
"""For the head of a request to come, and for its answer to go once it is there."""
MOST = 64
"""Connections at once; another one is closed at once."""
_WORKERS = 4

TEXT, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"


@dataclass(frozen=True)
class Endpoint:
    """The address to listen on."""

    host: str
    port: int

    @staticmethod
    def of(text: str, flag: str) -> Endpoint:
        """Parse `PORT`, which means this machine only, or `HOST:PORT`."""
        host, _, port = text.rpartition(":")
        host = host.strip("[]") or "127.0.0.1"
        if not port.isdecimal() or int(port) > 65535 or any(sign.isspace() or sign == "/" for sign in host):
            raise InputError(f"{flag} {text}: give a port such as 9464, which only this machine reaches, or HOST:PORT")
        return Endpoint(host, int(port))

    @property
    def is_local(self) -> bool:
        """Whether it is reachable only from this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}/" if ":" in self.host else f"http://{self.host}:{self.port}/"


@dataclass(frozen=True)
class Request:
    """A request."""

    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    """By names in small letters."""


@dataclass(frozen=True)
class Answer:
    """The response to a request."""

    status: int
    body: bytes = b""
    kind: str = TEXT
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Answer]


@contextlib.contextmanager
def serving(address: Endpoint, handler: Handler, token: str | None = None) -> Iterator[Endpoint]:
    """Answer requests while the block runs; yields the address, with the actual port in place of 0.

    `token`: only who shows it is answered, as `?token=…` or as a bearer's. Without one, at an address of this machine, only requests
    that name this machine are: a page of somebody else's must not read these.
    """
    server = _Server(handler, token, address.is_local)
    try:
        listener = socket.create_server((address.host, address.port), family=_family(address), backlog=MOST)
    except OSError as error:
        raise InputError(f"cannot listen at {address.host}:{address.port}: {error.strerror or error}; choose another address") from error
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="fedrts-serving")
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(listener), loop).result()
        yield Endpoint(address.host, listener.getsockname()[1])
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _family(address: Endpoint) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise InputError(f"there is no address {address.host}: {error.strerror or error}") from error


class _Server:
    def __init__(self, handler: Handler, token: str | None, local: bool) -> None:
        self.handler, self.token, self.local = handler, token, local
        self.workers = ThreadPoolExecutor(_WORKERS, "fedrts-serving")
        self.connections: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        self.server = await asyncio.start_server(self._connected, sock=listener, limit=LONGEST)

    async def stop(self) -> None:
        self.server.close()
        for task in list(self.connections):
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)
        self.workers.shutdown(wait=False, cancel_futures=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self.connections) >= MOST:
            writer.transport.abort()
            return
        self.connections.add(task)
        try:
            async with asyncio.timeout(SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            answer, bare = await self._answer(head)
            async with asyncio.timeout(SECONDS):
                await _send(writer, answer, bare)
        except asyncio.LimitOverrunError:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(SECONDS):
                    await _send(writer, Answer(431, b"the request is too long\n"), bare=False)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            self.connections.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _answer(self, head: bytes) -> tuple[Answer, bool]:
        """Return the response to a request, and whether only its head is wanted."""
        request, method = _parsed(head)
        if request is None:
            return Answer(400, b"this is no request\n"), False
        if method not in ("GET", "HEAD"):
            return Answer(405, b"nothing can be changed here: GET only\n", headers={"Allow": "GET, HEAD"}), False
        if not self._may(request):
            return Answer(403, b"a token is needed: open the address that was printed\n"), method == "HEAD"
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self.workers, self.handler, request)
        except Exception as error:  # whatever it was, the next request may fare better
            answer = Answer(500, f"this could not be answered: {type(error).__name__}\n".encode())
        return answer, method == "HEAD"

    def _may(self, request: Request) -> bool:
        if self.token is not None:
            shown = request.query.get("token", [request.headers.get("authorization", "").removeprefix("Bearer ")])[-1]
            return hmac.compare_digest(shown.encode(), self.token.encode())
        return not self.local or _names_this_machine(request.headers.get("host", ""))


def _names_this_machine(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return Endpoint(name, 0).is_local


def _parsed(head: bytes) -> tuple[Request | None, str]:
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None, ""
    try:
        target = urlsplit(words[1])
        query = parse_qs(target.query, max_num_fields=16)
    except ValueError:
        return None, ""
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    return Request(unquote(target.path), query, headers), words[0]


async def _send(writer: asyncio.StreamWriter, answer: Answer, bare: bool) -> None:
    fixed = {
        "Content-Type": answer.kind,
        "Content-Length": str(len(answer.body)),
        "Connection": "close",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}", *(f"{k}: {v}" for k, v in (fixed | answer.headers).items())]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + (b"" if bare else answer.body))
    await writer.drain()
    writer.write_eof()
    await asyncio.sleep(0)
