"""Connections with time limits: handshakes and request headers must arrive completely and soon, or the connection is closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedrts.flower.limits import CONNECTION, refused

_HANDSHAKE = 10.0
_GOODBYE = 5.0
_HEAD = 10.0
"""Seconds for a handshake, for its end, and for the head of a request."""
_LONGEST_HEAD = 2**16
"""Bytes of a request before its body."""


class Loop(asyncio.SelectorEventLoop):
    """An event loop that limits the time of a TLS handshake."""

    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.base_events.Server:
        if options.get("ssl") is not None:
            options |= {"ssl_handshake_timeout": _HANDSHAKE, "ssl_shutdown_timeout": _GOODBYE}
        return await super().create_server(*arguments, **options)


class Punctual(HttpToolsProtocol):
    """HTTP on one connection; a request's scope names the connection."""

    _due: asyncio.TimerHandle | None = None
    _bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope |= {CONNECTION: self.client}  # type: ignore[misc]
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        awaited = self._due is not None
        super().data_received(data)
        if awaited and self._due is not None:
            self._bytes += len(data)
            if self._bytes > _LONGEST_HEAD:
                self._drop(f"a request whose head is longer than {_LONGEST_HEAD:,} bytes")

    def send_400_response(self, msg: str) -> None:
        self._say("this is no HTTP")
        super().send_400_response(msg)

    def _await_head(self) -> None:
        if self._due is None:
            self._bytes, self._due = 0, self.loop.call_later(_HEAD, self._drop, f"no request within {_HEAD:.0f} seconds")

    def _head_came(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _drop(self, reason: str) -> None:
        self._say(reason)
        self._head_came()
        self.transport.abort()

    def _say(self, reason: str) -> None:
        peer = self.client[0] if self.client else "somebody"
        refused(peer, reason, f"{peer}: {reason}")
