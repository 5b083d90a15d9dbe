"""Threads that wait for each other sleep, so that a run takes its fair share of a busy machine."""

import os
import subprocess
import sys

import pytest

POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def said(code, **environment):
    """What a fresh interpreter prints."""
    surroundings = {name: value for name, value in os.environ.items() if name not in POLICIES} | environment
    done = subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.strip()


LOOK = "import os, fedrts; print(os.environ['OMP_WAIT_POLICY'], fedrts.OPENMP_CAME_FIRST)"


def test_threads_are_told_to_sleep_before_torch_is_loaded():
    assert said(LOOK) == "passive False"
    assert said("import subprocess, sys, fedrts; subprocess.run([sys.executable, '-c', " + repr(LOOK) + "])") == "passive False"


def test_what_the_user_has_set_is_kept():
    assert said(LOOK, OMP_WAIT_POLICY="active") == "active False"
    came_second = "import sys; sys.modules['torch'] = None; " + LOOK
    assert said(came_second) == "passive True"
    assert said(came_second, OMP_WAIT_POLICY="active") == "active False"
    assert said(came_second, GOMP_SPINCOUNT="5") == "passive False"


REST = """
import time
import {}
import {}
import torch
from fedrts.engines.threads import threads_for
torch.set_num_threads(2)
numbers = torch.ones(200_000)
with threads_for(1e12):
    numbers.exp()
    before = time.process_time()
    for _ in range(40):
        numbers.exp()
        time.sleep(0.005)
    print(time.process_time() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is Linux's")
@pytest.mark.parametrize("order", [("fedrts", "torch"), ("torch", "fedrts")])
def test_nobody_spins_between_two_operations(order):
    """40 short operations with pauses: some 0.01 s of processor time, and 0.3 where the second thread spins for 3 to 5 ms after each."""
    assert float(said(REST.format(*order))) < 0.1
