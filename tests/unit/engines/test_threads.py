"""Threads that wait for each other do not spin for long, so that a run takes its fair share of a busy machine."""

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


LOOK = "import os, fedrts; print(*map(os.environ.get, ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')))"


def test_threads_are_told_to_spin_less_and_so_are_those_of_children():
    assert said(LOOK) == "None 1000"
    assert said(f"import subprocess, sys, fedrts; subprocess.run([sys.executable, '-c', {LOOK!r}])") == "None 1000"


def test_what_the_user_has_set_is_kept():
    assert said(LOOK, OMP_WAIT_POLICY="active") == "active None"
    assert said(LOOK, GOMP_SPINCOUNT="5") == "None 5"


REST = """
import time
import fedrts
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
def test_nobody_spins_between_two_operations():
    """40 short operations with pauses: some 0.01 s of processor time, and 0.3 where the second thread spins for milliseconds after each."""
    assert float(said(REST)) < 0.1


@pytest.mark.slow
def test_work_that_only_meets_at_barriers_has_one_thread():
    code = "import torch; from fedrts.engines.threads import threads_for; torch.set_num_threads(2); c = threads_for({}); c.__enter__(); "
    assert [said(code.format(macs) + "print(torch.get_num_threads())") for macs in ("7e7", "1e9")] == ["1", "2"]
