"""Sites with data of their own in real processes over TLS: updates, metrics and image statistics, each of them summed in secret."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

from federating import Folder, Running

DYING = Path(__file__).parents[1] / "dying.py"
EXPERIMENT = """
recipe = "paper"
data = "elsewhere"
data_options = {shape = [3, 4, 4], classes = 2}
method = "fedrts"
model = "mlp"
model_options = {hidden = [12]}
rounds = 3
density = 0.5
clients = {total = 3, per_round = 3}
train = {epochs = 1, batch_size = 8}
engine = {wait = 300, timeout = 120}
secure = {aggregation = true, threshold = 2}
eval = {every = 1, fairness = false}
"""


def images(file: Path, number: int) -> str:
    rng, count = np.random.default_rng(number), 60 + 20 * number
    y = np.arange(count) % 2
    x = (rng.integers(0, 80, (count, 3, 4, 4)) + 90 * y[:, None, None, None] + 20 * number).astype(np.uint8)
    np.savez(file, x=x, y=y)
    return f"npz:{file}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_sites_with_data_of_their_own_of_which_one_is_killed(tmp_path: Path):
    """Killed before its words in round 1: the others do not open their sum without it, for the quorum is all sites."""
    folder = Folder(tmp_path, 3, EXPERIMENT)
    peers = tmp_path / "peers"
    peers.mkdir()
    for key in folder.keys:
        (peers / f"{key.stem}.pub").write_bytes(key.with_suffix(".pub").read_bytes())
    running = [Running(*folder.server())]
    try:
        for number in range(3):
            data = images(tmp_path / f"{number}.npz", number)
            own = [*folder.site(number), "--data", data, "--set", "test=0.25", "--peers", peers]
            dies = shlex.join(map(str, [sys.executable, DYING, "1:mask", *own]))
            running.append(Running(typed=f"exec {dies}", DEATHS=str(tmp_path), WHO="site") if number == 2 else Running(*own))
        assert running.pop().ended(400) == -signal.SIGKILL
        running.append(Running(*own))
        assert running[0].ended(800) == 0, running[0].text
        assert [one.ended(60) for one in running[1:]] == [0, 0, 0]
    finally:
        for one in running:
            one.kill()
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [line["clients"] for line in lines] == [[0, 1, 2]] * 3
    for line in lines:
        told = line["federated"]
        assert (told["clients"], told["missing"], told["samples"]) == ([], [], 15 + 20 + 25)
        assert line["accuracy"] == told["mean"]["accuracy"]
    found = json.loads((tmp_path / "run" / "normalisation.json").read_text())
    rows = [np.load(tmp_path / f"{number}.npz")["x"] for number in range(3)]
    assert found["mean"] == pytest.approx(np.concatenate(rows).mean((0, 2, 3)) / 255, abs=0.02)  # of the training rows
    for number, key in enumerate(folder.keys):
        openings = json.loads((key.with_suffix(".site") / "openings.json").read_text())["opened"]
        assert sorted(last for clients in openings.values() for last in clients.values()) == [0, 2, 2], number
