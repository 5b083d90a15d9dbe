"""Flower's SuperLink behind a gate of ours: `python -m fedrts.flower.superlink` takes the arguments of `flower-superlink`.

On its port Flower answers control and runtime requests from anybody, and reads requests before it asks who sent them. The gate
lets strangers reach nothing but what nodes need, checks a node's key and signature before the first byte of a request's body
is read, limits how much is read at once and for how long, and says who was refused and why.
"""

from __future__ import annotations

import asyncio.sslproto
import base64
import binascii
import datetime
import functools
import os
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedrts.flower import inside
from fedrts.flower.certificates import stamp
from fedrts.flower.inside import FLEET, KEY_HEADER, REGISTER, SIGNATURE_HEADER, TIME_HEADER
from fedrts.flower.keys import fingerprint, matching
from fedrts.flower.limits import (
    CONNECTION,
    Budget,
    Connections,
    CrowdedError,
    Listener,
    is_loopback,
    memory_at_once,
    most_connections,
    neighbourhood,
    refused,
)

LONGEST = 16 * 2**20
"""Bytes of a request; Flower sends arrays in pieces of 5 MiB."""
CLOCKS = 300.0
"""Seconds by which the clocks of a node and of the server may differ, either way."""
STALLED, WHOLE = 30.0, 600.0
"""Seconds without another byte of a request, and for all of it, after which it is given up."""
_TICKS = 10
"""Tenths of a second between two looks at the certificate."""
NAME = "FEDRTS_SUPERLINK"
"""A word by which the process that started this SuperLink knows it from another service on its port: it is the answer to GET /WORD."""
CLOSED_UNTIL = "FEDRTS_CLOSED_UNTIL"
"""Names a file; while it is not there nodes are told to come back (503): their keys are not registered yet."""

Headers = dict[bytes, bytes]


class RefusedRequestError(Exception):
    """A request that is refused; its sender and the person who runs the server learn why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Gate:
    """ASGI middleware, the outermost layer."""

    def __init__(
        self,
        app: Any,
        longest: int = LONGEST,
        closed_until: str | None = None,
        name: str | None = None,
        registered: Callable[[bytes], bool] | None = None,
        connections: Connections | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.app, self.longest, self.closed_until, self.name = app, longest, closed_until, name
        self.registered = registered
        """Is this public key (PEM) a registered node's? None: nodes need no key."""
        self.connections, self.budget = connections or Connections(), budget or Budget(memory_at_once())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.name and scope["path"] == f"/{self.name}":
            await _answer(send, 200, self.name)
            return
        headers: Headers = dict(reversed(scope["headers"]))  # of two the first counts, as it does for Flower
        peer = scope["client"][0] if scope.get("client") else ""
        who = f"{peer or 'somebody'}{key_name(headers)} at {scope['path']}"
        try:
            await self._admit(scope, headers, peer, receive, send, who)
        except RefusedRequestError as refusal:
            refused(peer, str(refusal.status), f"{who}: {refusal} ({refusal.status})")
            await _answer(send, refusal.status, str(refusal))

    async def _admit(self, scope: Any, headers: Headers, peer: str, receive: Any, send: Any, who: str) -> None:
        """Check everything that is known before the body; then read it, and pass the request on."""
        for_nodes = scope["path"].startswith(FLEET)
        if not for_nodes and not _is_local(peer, scope.get("server")):
            raise RefusedRequestError(403, "this address is for the server itself")
        if self.closed_until and for_nodes:
            if not os.path.exists(self.closed_until):
                await _answer(send, 503, "the server is starting")
                return
            self.closed_until = None
        size = self._size(headers)
        owner = neighbourhood(peer) if for_nodes else "localhost"
        if self.registered is not None and for_nodes:
            if scope["path"] == REGISTER:
                raise RefusedRequestError(403, "a node must be registered by the coordinator")
            owner = fingerprint(signer(headers, self.registered))
        if CONNECTION in scope and not self.connections.known(scope[CONNECTION], owner):
            raise RefusedRequestError(429, f"more than {self.connections.each} connections of one node")
        try:
            async with self.budget.held(owner, size if for_nodes else 0):
                body = await _read(receive, self.longest)
                if body is not None:
                    await self._pass_on(scope, [body], receive, send, who)
        except CrowdedError as error:
            raise RefusedRequestError(503, "too many requests at once: come back later") from error

    def _size(self, headers: Headers) -> int:
        """Return the announced length of the body."""
        if b"transfer-encoding" in headers:  # a length beside it would not count
            raise RefusedRequestError(411, "a request without a length")
        length = headers.get(b"content-length", b"")
        size = int(length) if length.isdigit() else 0
        if size > self.longest:
            raise RefusedRequestError(413, f"a request of {size:,} bytes, above {self.longest:,}")
        return size

    async def _pass_on(self, scope: Any, bodies: list[bytes], receive: Any, send: Any, who: str) -> None:
        """Pass the request to Flower; report it if Flower refuses."""
        status, said = 0, b""

        async def once_more() -> Any:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False} if bodies else await receive()

        async def watch(event: Any) -> None:
            nonlocal status, said
            if event["type"] == "http.response.start":
                status = event["status"]
            elif status >= 400 and len(said) < 500:
                said += event.get("body", b"")[:500]
            await send(event)

        await self.app(scope, once_more, watch)
        if status >= 400 and scope["path"].startswith(FLEET):
            peer = scope["client"][0] if scope.get("client") else ""
            refused(peer, str(status), f"{who}: {status} {said.decode('utf-8', 'replace')}")


def signer(headers: Headers, registered: Callable[[bytes], bool]) -> bytes:
    """The registered key (PEM) with which the time of a request was signed, a short while ago; all from its head.

    Flower checks the same, when it has read the body: nothing of the body is signed.
    """
    try:
        key, signature = (base64.b64decode(headers[name], validate=True) for name in (KEY_HEADER, SIGNATURE_HEADER))
        stamp = headers[TIME_HEADER]
        signed = datetime.datetime.fromisoformat(stamp.decode("ascii"))
        late = (inside.now() - signed).total_seconds()  # a time without its zone is no time
        theirs, ours = (f"{moment.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC" for moment in (signed, inside.now()))
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise RefusedRequestError(401, "no key and signature of a node") from error
    if not registered(key):
        raise RefusedRequestError(403, "this key is not registered")
    if not _verified(key, stamp, signature):
        raise RefusedRequestError(401, "the signature is not by this key")
    if abs(late) >= CLOCKS:
        most = f"they must agree to {CLOCKS / 60:.0f} minutes"
        raise RefusedRequestError(401, f"the node's clock says {theirs}, the server's {ours}: set the clock that is wrong, {most}")
    return key


@functools.lru_cache(256)  # Flower asks the same once more, at once; a longer memory only grows with every request
def _verified(pem: bytes, text: bytes, signature: bytes) -> bool:
    return inside.verify_signature(inside.bytes_to_public_key(pem), text, signature)


async def _read(receive: Any, longest: int) -> bytes | None:
    """Read the body of a request if it arrives in time; None if its sender went away."""
    body, due = bytearray(), time.monotonic() + WHOLE
    try:
        while len(body) <= longest:
            event = await asyncio.wait_for(receive(), min(STALLED, due - time.monotonic()))
            if event["type"] == "http.disconnect":
                return None
            body += event.get("body", b"")
            if not event.get("more_body", False):
                return bytes(body)
    except TimeoutError as error:
        raise RefusedRequestError(408, "a request whose body does not come") from error
    raise RefusedRequestError(413, f"a request of more than {longest:,} bytes")


def key_name(headers: Headers) -> str:
    """Return ` with key …`: the fingerprint of the public key that a request claims; empty without one."""
    try:
        return f" with key {fingerprint(base64.b64decode(headers[KEY_HEADER], validate=True))}"
    except (KeyError, binascii.Error):
        return ""


def _is_local(peer: str, server: tuple[str, int] | None) -> bool:
    """Whether the request comes from this machine: from loopback, or from the very address that it goes to."""
    return is_loopback(peer) or bool(peer and server is not None and peer == server[0])


async def _answer(send: Any, status: int, body: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


def _report_handshakes() -> None:
    """Report failed TLS handshakes, which asyncio ignores."""
    protocol: Any = asyncio.sslproto.SSLProtocol
    stock = protocol._on_handshake_complete

    def complete(self: Any, error: BaseException | type[BaseException] | None) -> None:
        if error is not None:
            peer = (self._transport.get_extra_info("peername") or ("somebody",))[0] if self._transport else "somebody"
            why = error if isinstance(error, BaseException) else "it went away"  # asyncio gives a class for that
            refused(peer, f"no TLS connection: {getattr(error, 'reason', None) or 'broken off'}", f"{peer}: no TLS connection: {why}")
        stock(self, error)

    protocol._on_handshake_complete = complete


def _newest_tls(config: Any, stock: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    context = stock()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def renewed(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Connections from now on are made with the certificate that is in these files now, if it can be used."""
    if fault := matching(Path(certificate), Path(key)):
        print(f"the new certificate is not used: {fault}", flush=True)
        return
    context.load_cert_chain(certificate, key)
    print("the certificate was renewed", flush=True)


def main() -> None:
    """Serve until told to stop."""
    from fedrts.flower.processes import end_with_parent

    end_with_parent()
    import uvicorn

    from fedrts.flower.punctual import Loop, Punctual

    app, config, state = inside.superlink()
    keyed = config.enable_supernode_auth
    connections = Connections(most=most_connections())
    app.add_middleware(
        Gate,
        closed_until=os.environ.get(CLOSED_UNTIL),
        name=os.environ.get(NAME),
        registered=(lambda key: state.get_node_id_by_public_key(key) is not None) if keyed else None,
        connections=connections,
    )
    _report_handshakes()
    inside.let_nodes_return()
    inside.agree_on_signatures(CLOCKS, WHOLE, _verified)
    settings = uvicorn.Config(
        app,
        loop=f"{Loop.__module__}:{Loop.__name__}",
        http=Punctual,
        ws="none",
        log_level="error",
        access_log=False,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_context_factory=_newest_tls if config.ssl_certfile else None,
        timeout_keep_alive=75,
    )
    try:
        listeners = Listener.at(config.host, config.port, connections)
    except OSError as error:
        sys.exit(f"cannot listen at {config.host}:{config.port}: {error.strerror or error}")

    class Renewing(uvicorn.Server):
        """Looks every second whether the certificate was renewed."""

        seen = tuple(stamp(Path(file)) for file in (config.ssl_certfile, config.ssl_keyfile) if file)

        async def on_tick(self, counter: int) -> bool:
            if counter % _TICKS == 0 and config.ssl_certfile and config.ssl_keyfile and settings.ssl is not None:
                now = tuple(stamp(Path(file)) for file in (config.ssl_certfile, config.ssl_keyfile))
                if now != self.seen:
                    self.seen = now
                    renewed(settings.ssl, config.ssl_certfile, config.ssl_keyfile)
            return await super().on_tick(counter)

    server = Renewing(settings)
    server.run(sockets=list(listeners))
    if not server.started:
        sys.exit("Flower's services did not start")


if __name__ == "__main__":
    main()
