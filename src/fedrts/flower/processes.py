"""Child processes that never outlive us: ended in order, or by the kernel if we are killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

_PARENT = "FEDRTS_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_PATIENCE = 5.0
"""Seconds that a child has to end by itself."""


@contextlib.contextmanager
def child(command: Sequence[str], environment: Mapping[str, str] | None = None, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in its own group (Ctrl-C is for us alone); it ends with the block."""
    surroundings = {**os.environ, **(environment or {}), _PARENT: str(os.getpid())}
    process: subprocess.Popen[bytes] = subprocess.Popen(command, env=surroundings, start_new_session=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a child to end, then kill it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def end_with_parent() -> None:
    """Make this child process end when its parent dies, however that happens."""
    parent = os.environ.pop(_PARENT, None)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it died before we asked
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(int(parent),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
