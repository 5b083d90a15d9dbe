"""Ctrl-C and SIGTERM: exit code 130 and a line that says how to continue."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

from fedrts.drain import Drain, Drained
from fedrts.logs import info, tell, warning


@contextlib.contextmanager
def as_interruption(words: str, drain: Drain | None = None) -> Iterator[None]:
    """End the command with `words` and exit code 130 on Ctrl-C or SIGTERM; with a `drain`, SIGTERM lets the task at hand end."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        if drain is None:
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, interrupt))
        else:
            stack.enter_context(drain.listening())
        try:
            yield
        except (Drained, KeyboardInterrupt) as stopped:
            if isinstance(stopped, Drained):
                tell(info("stopped", words.replace("interrupted", "stopped", 1)))
            else:
                tell(warning("interrupted", words))
            sys.exit(130)  # 0 would say that there is nothing left to do
