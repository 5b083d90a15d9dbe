"""Graceful stop: the first SIGTERM lets the current task finish, a second one aborts it.

drain = Drain(seconds=60, say=print)
with drain.listening():
    for order in orders:
        drain.begin()
        answer(order)
        drain.end()      # raises Drained if somebody asked meanwhile
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from fedrts.logs import info


class Drained(BaseException):
    """The process was asked to stop, and no task is left half done."""


class Drain:
    """Whether this process was asked to stop, and whether it is busy. Without `listening` it is never asked."""

    def __init__(self, seconds: float = 0.0, say: Callable[[str], None] = lambda text: None) -> None:
        self.seconds, self.say = seconds, say
        """How long the task at hand may take to end; 0: it is broken off at once."""
        self.asked = False
        self._busy = False
        self._over = threading.Event()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGTERM asks this process to stop."""
        before = signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        finally:
            self._over.set()
            signal.signal(signal.SIGTERM, before)

    def begin(self) -> None:
        """A task begins that is worth ending."""
        self._busy = True

    def end(self) -> None:
        """It is over; `Drained` is raised if somebody asked meanwhile."""
        self._busy = False
        if self.asked:
            raise Drained

    def _ask(self, *_: object) -> None:
        if not self._busy and not self.asked:
            self.asked = True
            raise Drained
        if self.asked or not self.seconds:
            raise KeyboardInterrupt
        self.asked = True
        threading.Thread(target=self._limit, daemon=True).start()

    def _limit(self) -> None:
        """Runs in its own thread, because a signal handler must not print while its process is printing."""
        words = f"asked to stop: the task at hand ends first, for up to {self.seconds:g} s; another SIGTERM breaks it off"
        self.say(info("stopping", words, seconds=self.seconds))
        if not self._over.wait(self.seconds):
            os.kill(os.getpid(), signal.SIGTERM)
