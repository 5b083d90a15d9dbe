"""The soak of benchmarks/soak.py in full: 200 rounds, ten nodes, random kills, a network that is cut, one node up and down all the time."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedrts
from fedrts.testing.replay import replayed

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")
pytest.importorskip("prometheus_client", reason="fedrts[metrics] is not installed")

from fedrts.testing import soak
from fedrts.testing.network import Network
from fedrts.testing.soak import Generation, Ordeal, Soaked, soaked


@pytest.mark.slow
@pytest.mark.timeout(4000)  # a quarter of an hour on two cores that have nothing else to do
def test_a_federation_outlives_kills_cuts_and_a_flapping_node(tmp_path: Path):
    found = soaked(tmp_path, Ordeal())
    assert found.faults == []
    assert found.kills.total() >= 20
    assert found.kills["server"] >= 3
    assert found.cuts.total() >= 10
    assert found.flaps >= 5
    assert found.missing, "nobody was missed in any round: the soak was too kind"


# -- what the soak finds: its checks can fail -----------------------------------------------------------------------


SMALL: dict[str, Any] = {
    "recipe": "paper",
    "data": "digits",
    "rounds": 4,
    "density": 0.3,
    "clients": {"total": 4, "per_round": 4, "partition": "iid"},
    "train": {"epochs": 1},
    "model_options": {"hidden": [8]},
    "topology": {"interval": 2},
    "wire": {"value_type": "int4", "feedback": True},
    "device": "cpu",
    "engine": "serial",
}


def test_a_replay_is_of_the_clients_of_the_history(tmp_path: Path):
    fedrts.run(**SMALL, out=tmp_path / "run")
    found = Soaked(Ordeal())
    soak._check_model(tmp_path / "run", found)
    assert found.faults == []
    history = tmp_path / "run" / "history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    lines[1]["clients"] = lines[1]["clients"][1:]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["clients"] for line in lines] == replayed(tmp_path / "run")[0].plan.counted  # type: ignore[attr-defined]
    soak._check_model(tmp_path / "run", found)
    assert "model.safetensors is not that of a serial replay" in found.faults[0]


def generation(role: str, memory: float, descriptors: float = 0.0, minutes: int = 4) -> Generation:
    """A process of some minutes that grows by so much a minute."""
    found = Generation(role, 1, 0.0, [float(second) for second in range(60 * minutes)], working=10.0)
    found.memory = [200 + min(second, 30) + memory * second / 60 for second in range(60 * minutes)]
    found.descriptors = [round(20 + descriptors * second / 60) for second in range(60 * minutes)]
    return found


@pytest.mark.parametrize(
    ("memory", "descriptors", "minutes", "word"),
    [
        (0.0, 0.0, 4, ""),
        (1.0, 0.0, 4, "MB a minute"),
        (0.3, 0.0, 4, ""),  # less than a flat process may gain and lose
        (0.3, 0.0, 8, "MB a minute"),
        (0.0, 3.0, 4, "file descriptors"),
    ],
)
def test_processes_that_grow_are_found(memory: float, descriptors: float, minutes: int, word: str):
    found = Soaked(Ordeal())
    found.generations = [generation("server", 0.1), generation("superlink", 0.1), generation("node 3", memory, descriptors, minutes)]
    soak._check_flatness(found)
    assert [word in fault for fault in found.faults] == [True] * bool(word)


def test_processes_that_nobody_watched_for_long_are_found():
    found = Soaked(Ordeal())
    found.generations = [generation("server", 0.0), generation("superlink", 0.0, minutes=2), generation("node 3", 0.0)]
    soak._check_flatness(found)
    assert found.faults == ["no superlink lived long enough to say whether it grows"]


def line(index: int) -> dict[str, object]:
    missing = [{"client": 2, "reason": "late"}, {"client": 3, "reason": "not reachable"}]
    return {"round": index, "clients": [0, 1], "rejected": missing, "upload_bytes": 10, "download_bytes": 20 + index}


def scrape(done: int, first: int, **wrong: float) -> dict[str, float]:
    """Metrics of a server that has played the rounds from `first` up to `done`."""
    told = soak._expected([line(index) for index in range(first, done)])
    told |= wrong
    named = {f"fedrts_{name}_total": value for name, value in told.items() if name != "clients_missing"}
    named['fedrts_clients_missing_total{reason="not reachable"}'] = told.get("clients_missing", 0.0)
    return {"fedrts_rounds_done": done, "fedrts_rounds_total": done - first, **named}


@pytest.mark.parametrize("wrong", [{}, {"clients_late": 4.0}, {"download_bytes": 1.0}, {"clients_missing": 2.0}])
def test_counters_that_disagree_with_the_history_are_found(wrong: dict[str, float]):
    """The first server played round 4 too, which the second one played again: nobody knows how that was."""
    found = Soaked(Ordeal())
    first, second = generation("server", 0.0), generation("server", 0.0)
    first.scrapes = [scrape(0, 0), scrape(4, 0), scrape(4, 0), scrape(5, 0), scrape(5, 0, upload_bytes=99.0)]
    second.scrapes = [{"fedrts_ready": 1.0}, scrape(5, 4), scrape(9, 4, **wrong), scrape(9, 4, **wrong), replace_rounds(scrape(10, 4))]
    found.generations = [first, second]
    soak._check_counters([line(index) for index in range(10)], found)
    assert found.counted == 9
    assert bool(found.faults) is bool(wrong)


def replace_rounds(scrape: dict[str, float]) -> dict[str, float]:
    """A scrape taken in the middle of a change."""
    return {**scrape, "fedrts_upload_bytes_total": 0.0}


def test_what_happens_is_drawn_by_the_seed():
    from random import Random

    settings = Ordeal()
    events = list(soak._events(settings, Random(1)))
    assert events == list(soak._events(settings, Random(1)))
    assert events != list(soak._events(replace(settings, kills=25), Random(2)))
    assert sum(event.what == "node" for event in events) == settings.kills - settings.server_kills
    assert all(event.round < settings.rounds - 2 for event in events)


def answered(port: int, seconds: float) -> bool:
    """Does an echo come back over this port?"""
    try:
        with socket.create_connection(("127.0.0.1", port), seconds) as connection:
            connection.sendall(b"hello")
            return connection.recv(5) == b"hello"
    except OSError:
        return False


@pytest.mark.parametrize("silently", [True, False])
def test_a_network_is_cut_for_one_node_alone(silently: bool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        network = Network(listener.getsockname()[1], 2)
        assert answered(network.port(0), 10)
        with socket.create_connection(("127.0.0.1", network.port(0)), 10) as open_before:
            open_before.sendall(b"hello")
            assert open_before.recv(5) == b"hello"
            network.cut(0, 1.0, silently)
            time.sleep(0.3)
            assert not answered(network.port(0), 0.3)
            assert answered(network.port(1), 10)
            with contextlib.suppress(OSError):
                assert open_before.recv(5) == b"", "it was broken"
        time.sleep(1.0)
        assert answered(network.port(0), 10)
        network.close()


def echo(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(
            target=lambda one=connection: [one.sendall(data) for data in iter(lambda: one.recv(100), b"")], daemon=True
        ).start()
