"""SIGTERM to the real processes of a federation: the round at hand ends, nothing is lost, and it goes on to the same bits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

import fedrts
from federating import EXPERIMENT, Folder, Running
from fedrts.runs.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Start = Callable[..., Running]
LONG = EXPERIMENT.replace("rounds = 3", "rounds = 8") + "checkpoint = {every = 100}\n"


def test_a_drained_federation_goes_on_to_the_same_bits(start: Start, folder: Folder, tmp_path: Path):
    folder.experiment.write_text(LONG)
    server = start(*folder.server())
    nodes = [start(*folder.client(number, f"{number},{number + 3}")) for number in range(3)]
    server.until("round    2 of 8")
    server.kill(signal.SIGTERM)
    assert server.ended(90) == 130, server.text
    assert "the task at hand ends first" in server.text
    assert server.lines[-1] == "stopped; continue with: the same command"
    checkpoints = list((folder.path / "run" / "checkpoint").glob("*.safetensors"))
    history = (folder.path / "run" / "history.jsonl").read_text().splitlines()
    assert [int(file.name[:8]) for file in checkpoints] == [len(history)], "what was played is saved, though no checkpoint was due"
    nodes[0].kill(signal.SIGTERM)
    assert nodes[0].ended(60) == 130, nodes[0].text
    assert nodes[0].lines[-1] == "stopped; the same command takes part again"
    again = start(*folder.server())
    start(*folder.client(0, "0,3"))
    assert again.ended(300) == 0, again.text
    assert [node.ended(60) for node in nodes[1:]] == [0, 0], "they waited for the server"
    fedrts.run(folder.experiment, engine="serial", out=tmp_path / "serial")
    for name in ("model.safetensors", "masks.safetensors", "topology.jsonl"):
        assert (folder.path / "run" / name).read_bytes() == (tmp_path / "serial" / name).read_bytes(), name


def test_a_node_answers_before_it_goes(start: Start, folder: Folder):
    slow = LONG.replace("train = {epochs = 1}", "train = {epochs = 60, batch_size = 8}").replace("per_round = 4", "per_round = 6")
    folder.experiment.write_text(slow.replace("rounds = 8", "rounds = 2") + "guard = {quorum = 1.0}\n")
    server = start(*folder.server())
    command = folder.client(0, "0,1,2")
    stopped = start(*command)
    start(*folder.client(1, "3,4,5"))
    log, due = folder.keys[0].with_suffix(".site") / "audit.jsonl", time.monotonic() + 200
    while not (log.exists() and '"event":"asked"' in log.read_text()) and time.monotonic() < due:
        time.sleep(0.05)
    assert "worked" not in stopped.text, "it is in the middle of its work"
    stopped.kill(signal.SIGTERM)
    assert stopped.ended(90) == 130, stopped.text
    ended = stopped.lines[-3:]
    assert [words in line for words, line in zip(("asked to stop", "worked for client 0, 1, 2", "stopped"), ended, strict=True)] == [
        True
    ] * 3
    start(*command)
    assert server.ended(400) == 0, server.text
    lines = RunFolder(folder.path / "run").history()
    assert (lines[0]["clients"], lines[0]["rejected"]) == ([0, 1, 2, 3, 4, 5], []), "its answer of the first round counts"
    assert lines[1]["clients"] == [0, 1, 2, 3, 4, 5], "and the second waits for it"


def test_a_second_signal_breaks_the_round_off(start: Start, folder: Folder):
    folder.experiment.write_text(LONG.replace("wait = 90", "wait = 300"))
    server = start(*folder.server())
    start(*folder.client(0, "0,1,2"))
    lost = start(*folder.client(1, "3,4,5"))
    server.until("round    1 of 8")
    lost.kill(signal.SIGSTOP)  # the round at hand does not end
    server.kill(signal.SIGTERM)
    server.until("the task at hand ends first")
    server.kill(signal.SIGTERM)
    assert server.ended(30) == 130, server.text
    assert server.lines[-1] == "interrupted; continue with: the same command"


def test_a_round_that_does_not_end_in_time_is_broken_off(start: Start, folder: Folder):
    folder.experiment.write_text(LONG.replace("wait = 90", "wait = 300"))
    server = start(*folder.server(), "--drain", 3)
    start(*folder.client(0, "0,1,2"))
    lost = start(*folder.client(1, "3,4,5"))
    server.until("round    1 of 8")
    lost.kill(signal.SIGSTOP)
    server.kill(signal.SIGTERM)
    assert server.ended(30) == 130, server.text
    assert "for up to 3 s" in server.text
