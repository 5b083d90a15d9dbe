"""Responses to a browser: the page, and whether there is a newer one."""

from __future__ import annotations

import threading
from pathlib import Path

from fedrts.report import html
from fedrts.serving.http import HTML, Answer, Request
from fedrts.watch.now import live, stamp

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"
_HEADERS = {"Content-Security-Policy": f"{_POLICY}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"}


class LivePage:
    """The live page of one run folder, rendered once per change, however many people watch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._turn = threading.Lock()
        self._made: tuple[str, bytes] | None = None

    def __call__(self, request: Request) -> Answer:
        """Serve two addresses, and no file of any folder."""
        if request.path == "/stamp":
            return Answer(200, self._stamp().encode())
        if request.path != "/":
            return Answer(404, b"there is one page, at /\n")
        return Answer(200, self._page(), HTML, _HEADERS)

    def _stamp(self) -> str:
        return stamp(self.folder)

    def _page(self) -> bytes:
        with self._turn:
            now = self._stamp()  # before anything is read: what is written meanwhile makes another one
            if self._made is None or self._made[0] != now:
                self._made = now, html.render(live(self.folder), live=now).encode()
            return self._made[1]
