"""A network that fails: every node reaches the server through a door of its own, which can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field


@dataclass
class _Door:
    """One node's way to the server."""

    port: int = 0
    shut: bool = False
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    """Unset while bytes are held back, with connections left open."""
    connections: set[asyncio.StreamWriter] = field(default_factory=set)


class Network:
    """Passes TCP connections on to a port of this machine."""

    def __init__(self, target: int, doors: int) -> None:
        self.target, self._doors = target, [_Door() for _ in range(doors)]
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(30)

    def port(self, number: int) -> int:
        """Where this node finds the server."""
        return self._doors[number].port

    def cut(self, number: int, seconds: float, silently: bool) -> None:
        """Break a node's connections and let no new ones through for a while; `silently`: hold their bytes back first, as a dead line."""
        asyncio.run_coroutine_threadsafe(self._cut(self._doors[number], seconds, silently), self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._open())
        ready.set()
        self._loop.run_forever()

    async def _open(self) -> None:
        for door in self._doors:
            door.flows.set()

            async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, door: _Door = door) -> None:
                await self._pass_on(door, reader, writer)

            server = await asyncio.start_server(passed, "127.0.0.1", 0)
            door.port = server.sockets[0].getsockname()[1]

    async def _cut(self, door: _Door, seconds: float, silently: bool) -> None:
        if silently:
            door.flows.clear()
            await asyncio.sleep(seconds)
        door.shut = not silently
        for writer in list(door.connections):
            writer.transport.abort()
        door.flows.set()
        if not silently:
            await asyncio.sleep(seconds)
            door.shut = False

    async def _pass_on(self, door: _Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if door.shut:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        door.connections |= both
        pumps = [asyncio.ensure_future(_pump(door, *way)) for way in ((reader, far_writer), (far_reader, writer))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        door.connections -= both
        for pump in pumps:
            pump.cancel()
        for end in both:
            end.close()  # what was taken from one side still reaches the other


async def _pump(door: _Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(2**16):
            await door.flows.wait()
            writer.write(data)
            await writer.drain()
