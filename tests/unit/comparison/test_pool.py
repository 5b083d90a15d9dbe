"""Processes that play the cells of a comparison."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, signal
from fedrts.comparison.pool import _deaf

def report(pipe):
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=report, args=(theirs,))
        with _deaf():
            process.start()
        print(ours.recv(), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        process.join()
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be blocked on Windows")
def test_no_worker_hears_ctrl_c_from_its_first_moment_on_and_the_parent_does(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines() == ["True False", "True False"], ended.stderr
