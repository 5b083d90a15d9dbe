"""Ctrl-C and SIGTERM: exit code 130 and a line that says how to continue."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def as_interruption(words: str) -> Iterator[None]:
    """End the command with `words` and exit code 130 on Ctrl-C or SIGTERM."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print(words, file=sys.stderr)
        sys.exit(130)
