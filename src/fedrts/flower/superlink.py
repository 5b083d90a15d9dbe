"""Flower's SuperLink behind a gate of ours: `python -m fedrts.flower.superlink` takes the arguments of `flower-superlink`.

On its port Flower answers control and runtime requests from anybody. The gate lets strangers reach nothing but what nodes
need, refuses requests that are too long before they are read, and says who was refused and why.
"""

from __future__ import annotations

import asyncio.sslproto
import base64
import binascii
import importlib
import ipaddress
import os
from typing import Any

from fedrts.errors import printable
from fedrts.flower.keys import fingerprint

OPEN = "/v1/fleet/"
"""What nodes need."""
LONGEST = 16 * 2**20
"""Bytes of a request; Flower sends arrays in pieces of 5 MiB."""
REFUSED = "refused: "
NAME = "FEDRTS_SUPERLINK"
"""A word by which the process that started this SuperLink knows it from another service on its port: it is the answer to GET /WORD."""
CLOSED_UNTIL = "FEDRTS_CLOSED_UNTIL"
"""Names a file; while it is not there nodes are told to come back (503): their keys are not registered yet."""
_KEY_HEADER = b"flwr-public-key"


class Gate:
    """ASGI middleware, the outermost."""

    def __init__(self, app: Any, longest: int = LONGEST, closed_until: str | None = None, name: str | None = None) -> None:
        self.app, self.longest, self.closed_until, self.name = app, longest, closed_until, name

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.name and scope["path"] == f"/{self.name}":
            await _answer(send, 200, body=self.name)
            return
        headers = dict(scope["headers"])
        peer = scope["client"][0] if scope.get("client") else ""
        who = f"{peer or 'somebody'}{key_name(headers)} at {scope['path']}"
        if not scope["path"].startswith(OPEN) and not _is_local(peer, scope.get("server")):
            await _answer(send, 403, f"{who}: this address is for the server itself")
            return
        if self.closed_until and scope["path"].startswith(OPEN):
            if not os.path.exists(self.closed_until):
                await _answer(send, 503)
                return
            self.closed_until = None
        length = headers.get(b"content-length", b"")
        if b"transfer-encoding" in headers:  # a length beside it would not count
            await _answer(send, 411, f"{who}: a request without a length")
            return
        if length.isdigit() and int(length) > self.longest:
            await _answer(send, 413, f"{who}: a request of {int(length):,} bytes, above {self.longest:,}")
            return
        status, body = 0, b""

        async def watch(event: Any) -> None:
            nonlocal status, body
            if event["type"] == "http.response.start":
                status = event["status"]
            elif status >= 400 and len(body) < 500:
                body += event.get("body", b"")[:500]
            await send(event)

        await self.app(scope, receive, watch)
        if status >= 400 and scope["path"].startswith(OPEN):
            say(f"{who}: {status} {body.decode('utf-8', 'replace')}")


def say(text: str) -> None:
    """One line that the server reads and passes on."""
    print(REFUSED + printable(" ".join(text.split()), 1000), flush=True)


def key_name(headers: dict[bytes, bytes]) -> str:
    """` with key …`: the fingerprint of the public key that a request claims; empty without one."""
    try:
        return f" with key {fingerprint(base64.b64decode(headers[_KEY_HEADER], validate=True))}"
    except (KeyError, binascii.Error):
        return ""


def _is_local(peer: str, server: tuple[str, int] | None) -> bool:
    """Does somebody on this machine ask? Then it comes from loopback, or from the very address that it goes to."""
    if peer and server is not None and peer == server[0]:
        return True
    try:
        return ipaddress.ip_address(peer).is_loopback
    except ValueError:
        return False


async def _answer(send: Any, status: int, reason: str = "", body: str = "refused") -> None:
    if reason:
        say(f"{reason} ({status})")
    headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


def _report_handshakes() -> None:
    """Failed TLS handshakes are silent in asyncio; who tried is worth a line."""
    protocol: Any = asyncio.sslproto.SSLProtocol
    stock = protocol._on_handshake_complete

    def complete(self: Any, error: BaseException | None) -> None:
        if error is not None:
            peer = (self._transport.get_extra_info("peername") or ("somebody",))[0] if self._transport else "somebody"
            say(f"{peer}: no TLS connection: {error}")
        stock(self, error)

    protocol._on_handshake_complete = complete


def _let_nodes_return() -> None:
    """A node that was killed is online for another minute, and Flower would not let it in again: it takes its own place."""
    from flwr.superlink.servicer.fleet import fleet_handlers

    stock = fleet_handlers.activate_node

    def activate_node(request: Any, state: Any) -> Any:
        node = state.get_node_id_by_public_key(request.public_key)  # the request is signed with this key
        if node is not None:
            state.deactivate_node(node)
        return stock(request, state)

    fleet_handlers.activate_node = activate_node


def main() -> None:
    """Serve until told to stop."""
    from fedrts.flower.processes import end_with_parent

    end_with_parent()
    import uvicorn
    from flwr.superlink.main import create_app

    stock = importlib.import_module("flwr.superlink.cli.flower_superlink")  # its package has a function of the same name
    config = stock._parse_superlink_lifespan_config()
    app = create_app(config, stock.SuperLinkLifespan)
    app.add_middleware(Gate, closed_until=os.environ.get(CLOSED_UNTIL), name=os.environ.get(NAME))
    _report_handshakes()
    _let_nodes_return()
    uvicorn.run(
        app,
        host=config.host,
        port=config.port,
        loop="asyncio",
        log_level="warning",
        access_log=False,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        timeout_keep_alive=75,
    )


if __name__ == "__main__":
    main()
