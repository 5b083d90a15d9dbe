"""A study among two sites with real processes: a stranger is refused, a site is lost, another withdraws, and the study ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

from federating import ENVIRONMENT, Folder, Running, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # processes that import torch, on a machine that may be busy

Start = Callable[..., Running]


@pytest.fixture
def start():
    with processes() as begin:
        yield begin


@pytest.fixture
def study(tmp_path: Path) -> Folder:
    """Keys of three nodes, data of two sites, and an experiment of theirs."""
    folder, rng = Folder(tmp_path), np.random.default_rng(0)
    for name, count in (("coordinator", 60), ("a", 80), ("b", 50), ("c", 70)):
        y = np.arange(count) % 3
        x = (rng.standard_normal((count, 12)) + y[:, None]).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, x_test=x, y_test=y)
    folder.experiment.write_text(
        f"""
        data = "npz:{tmp_path}/coordinator.npz"
        rounds = 40
        clients = {{total = 2, per_round = 2, partition = "sites"}}
        train = {{epochs = 1, batch_size = 10, lr = 0.1}}
        engine = {{wait = 90}}
        """
    )
    return folder


def site(folder: Folder, number: int, name: str) -> list[object]:
    return [*folder.site(number), "--data", f"npz:{folder.path}/{name}.npz"]


def roster(folder: Folder, *arguments: object) -> str:
    command = [sys.executable, "-m", "fedrts", "roster", str(folder.path / "run"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=True).stdout


def history(folder: Folder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.path / "run" / "history.jsonl").open()]


def test_a_study_from_a_wrong_site_to_its_end(start: Start, study: Folder):
    server = start(*study.server())
    wrong = start(*site(study, 2, "c"))  # it comes first, and its key is registered
    wrong.until("taking part in")
    assert "site-2" in roster(study)
    roster(study, "remove", 0)
    assert wrong.ended(60) == 77
    assert "the coordinator removed this node from the study" in wrong.text
    refused = start(*site(study, 2, "c"))
    assert refused.ended(60) == 77
    assert "withdrew or was removed" in refused.text
    assert "taking part" not in refused.text

    second = start(*site(study, 1, "b"))  # numbers are by registration, whoever comes first
    second.until("taking part in")
    first = start(*site(study, 0, "a"))
    second.until("worked for client 1")
    second.kill()
    server.until("cannot go on without client 1 (site-1)")
    second = start(*site(study, 1, "b"))
    second.until("worked for client 1")
    due = time.monotonic() + 120
    while not history(study) and time.monotonic() < due:  # both have trained together
        time.sleep(0.1)

    first.kill(signal.SIGTERM)
    assert first.ended(60) == 130, "it ended the task at hand, and the study goes on"
    withdrawal = start(*study.site(0), "--withdraw")
    assert withdrawal.ended(120) == 0, withdrawal.text
    assert "this site takes part no more" in withdrawal.text

    assert server.ended(300) == 0, server.text
    assert second.ended(60) == 0, second.text
    assert "the study is finished" in second.text
    lines = history(study)
    (since,) = [line["round"] for line in lines if {"client": 0, "reason": "withdrawn"} in line["rejected"]]
    assert 0 < since < 40
    assert [line["clients"] for line in lines] == [[0, 1]] * since + [[1]] * (40 - since), "nobody trained on alone before"
    assert f"withdrawn since round {since}" in roster(study)


def test_a_node_whose_key_is_bound_to_other_clients_goes(start: Start, tmp_path: Path):
    folder = Folder(tmp_path)
    start(*folder.server())
    command = folder.client(0, "0,1,2,3,4,5")
    folder.bind(0, [0])
    greedy = start(*command)
    assert greedy.ended(120) == 77
    assert "client 1 is not bound to its key" in greedy.text
