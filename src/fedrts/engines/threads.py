"""How many threads a piece of work is worth, and how they wait for each other.

Threads of OpenMP spin at barriers for milliseconds, which beside other work is the time of a core that somebody else needs. The package
asks for sleep instead (OMP_WAIT_POLICY, in `fedrts/__init__.py`), which is heard only where it is imported before torch. Neither that nor
what is done here instead changes a bit of any result.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

import fedrts

WORTH_THREADS = 5e7
"""Multiply-accumulates of a forward pass from which on several threads pay."""


@contextmanager
def threads_for(macs: float) -> Iterator[None]:
    """One thread for small work, which gains nothing from a second one and loses much where cores are busy; else as many as there are."""
    if fedrts.OPENMP_CAME_FIRST:
        wait_asleep()
    before = torch.get_num_threads()
    torch.set_num_threads(1 if macs < WORTH_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def wait_asleep() -> None:
    """Have libgomp, where it is loaded already, spin for microseconds only: its manual promises that where threads outnumber cores.

    So a team of one thread more than there are cores is started, and sleeps as long as this process lives.
    """
    if sys.platform != "linux":  # elsewhere torch has another OpenMP
        return
    paths = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text("utf-8").splitlines() if "libgomp" in line}
    for path in paths:
        ready = threading.Event()
        threading.Thread(target=_sleep, args=(ctypes.CDLL(path), ready), name="fedrts-wait-asleep", daemon=True).start()
        ready.wait()


def _sleep(gomp: ctypes.CDLL, ready: threading.Event) -> None:
    harmless = gomp.omp_get_num_procs
    gomp.GOMP_parallel(harmless, None, gomp.omp_get_num_procs() + 1, 0)
    ready.set()
    threading.Event().wait()  # a team ends with the thread that has started it
