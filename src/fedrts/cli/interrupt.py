"""Ctrl-C and SIGTERM: exit code 130 and a line that says how to continue; 0 after a drain."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

from fedrts.drain import Drain, Drained


@contextlib.contextmanager
def as_interruption(words: str, drain: Drain | None = None) -> Iterator[None]:
    """End the command with `words` and exit code 130 on Ctrl-C or SIGTERM; with a `drain`, SIGTERM ends it in order, with 0."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        if drain is None:
            signal.signal(signal.SIGTERM, interrupt)
        else:
            stack.enter_context(drain.listening())
        try:
            yield
        except Drained:
            print(words.replace("interrupted", "stopped", 1), file=sys.stderr)
        except KeyboardInterrupt:
            print(words, file=sys.stderr)
            sys.exit(130)
