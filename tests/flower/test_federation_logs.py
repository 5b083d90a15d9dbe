"""Logs of a real federation as JSON: a server and its nodes, one of which is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")
pytest.importorskip("prometheus_client", reason="fedrts[metrics] is not installed")

from federating import EXPERIMENT, Folder, Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JSON = ("--log-format", "json")


def told(running: Running) -> list[dict[str, Any]]:
    """What a process has said, every line of it."""
    found = [json.loads(line) for line in running.lines]
    for line in found:
        assert list(line)[:4] == ["time", "level", "event", "message"]
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    return found


def events(running: Running, *levels: str) -> set[str]:
    return {line["event"] for line in told(running) if not levels or line["level"] in levels}


def test_every_line_of_a_federation_is_json(start: Callable[..., Running], folder: Folder):
    folder.experiment.write_text(EXPERIMENT.replace("rounds = 3", "rounds = 30"))
    server = start(*folder.server(), *JSON, "--metrics", 0)
    server.until('"event": "waiting"')
    nodes = [start(*folder.client(0, "0,3"), *JSON), start(*folder.client(1, "1,4"), *JSON, "--log-level", "warning")]
    lost = start(*folder.client(2, "2,5"), *JSON, "--log-level", "debug")
    stranger = start(*folder.site(0), "--partition", "0", "--key", folder.path / "none.key", *JSON)
    lost.until('"event": "worked"')
    lost.kill(signal.SIGKILL)
    lost.ended(30)
    server.until("LOST")
    again = start(*folder.client(2, "2,5"), *JSON)
    assert [running.ended(300) for running in (server, *nodes, again)] == [0, 0, 0, 0], server.text
    assert stranger.ended(60) == 2

    said = told(server)
    rounds = [line for line in said if line["event"] == "round"]
    assert [line["round"] for line in rounds] == list(range(30)), "every round is a line"
    history = [json.loads(line) for line in (folder.path / "run" / "history.jsonl").read_text().splitlines()]
    for line, played in zip(rounds, history, strict=True):
        assert line["bytes"] == played["upload_bytes"] + played["download_bytes"]
        assert (line["clients"], line["accuracy"], line["seconds"]) == (played["clients"], played["accuracy"], played["seconds"])
    assert events(server, "info") >= {"metrics", "waiting", "connected", "started", "round", "finished"}
    assert events(server, "warning") >= {"lost"}
    gone = next(line for line in said if line["event"] == "lost" and "site-2" in line["message"])
    assert gone["level"] == "warning"
    came = [(line["name"], line["clients"]) for line in said if line["event"] == "connected"]
    assert sorted(came) == [("site-0", [0, 3]), ("site-1", [1, 4]), ("site-2", [2, 5]), ("site-2", [2, 5])]

    worked = [line for line in told(nodes[0]) if line["event"] == "worked"]
    assert worked
    assert all(set(line["clients"]) <= {0, 3} and line["bytes"] > 0 and line["seconds"] >= 0 for line in worked)
    assert events(nodes[0]) >= {"connected", "joined", "worked", "finished"}
    assert told(nodes[1]) == [], "nothing went wrong there"
    assert {line["entry"] for line in told(lost) if line["level"] == "debug" and line["event"] == "audit"} >= {"connected", "asked", "sent"}
    (failed,) = told(stranger)
    assert (failed["level"], failed["event"]) == ("error", "error")
    assert "none.key" in failed["message"]


def test_a_dry_run_and_a_stop_are_json_too(start: Callable[..., Running], folder: Folder):
    folder.experiment.write_text(EXPERIMENT.replace("rounds = 3", "rounds = 300"))
    server = start(*folder.server(), *JSON)
    server.until('"event": "waiting"')
    looking = start(*folder.client(0, "0,3"), "--dry-run", *JSON, "--log-level", "error")
    assert looking.ended(120) == 0, looking.text
    assert [line["event"] for line in told(looking)] == ["experiment"]
    nodes = [start(*folder.client(number, f"{number},{number + 3}"), *JSON) for number in range(3)]
    server.until('"event": "round"')
    for running in (server, *nodes):
        running.kill(signal.SIGTERM)
        assert running.ended(90) == 130
        assert events(running, "info") >= {"stopped"}, running.text
