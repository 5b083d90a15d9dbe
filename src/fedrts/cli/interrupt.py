"""Ctrl-C and SIGTERM: exit code 130 and a word on how to go on."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def as_interruption(words: str) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the command with `words` and exit code 130."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print(words, file=sys.stderr)
        sys.exit(130)
