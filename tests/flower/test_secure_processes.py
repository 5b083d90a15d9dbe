"""Secure sums between real processes over TLS, of which many are killed: the serial engine's bits with the same survivors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

import safetensors.torch
import torch

from federating import ENVIRONMENT, Folder
from fedrts import config
from fedrts.runs.build import assemble
from fedrts.server.rounds import play

DRAINED = 130
DYING = Path(__file__).parents[1] / "dying.py"
EXPERIMENT = """
recipe = "paper"
data = "digits"
method = "fedrts"
rounds = {rounds}
density = 0.3
clients = {{total = {nodes}, per_round = {nodes}, partition = "iid"}}
train = {{epochs = 1}}
topology = {{interval = 4, end = {rounds}}}
engine = {{wait = 120, timeout = 60}}
secure = {{aggregation = true}}
eval = {{fairness = false}}
checkpoint = {{every = 3}}
"""


class Federation:
    """A server and nodes that die as they are told, and are started again."""

    def __init__(self, path: Path, nodes: int, rounds: int, deaths: dict[str, str], by: signal.Signals = signal.SIGKILL) -> None:
        self.folder = Folder(path, nodes, EXPERIMENT.format(nodes=nodes, rounds=rounds))
        self.path, self.deaths, self.died, self.by = path, deaths, dict.fromkeys(deaths, 0), by
        (path / "deaths").mkdir()
        peers = path / "peers"
        peers.mkdir()
        self.commands = {"server": self.folder.server()}
        for number in range(nodes):
            (peers / f"site-{number}.pub").write_bytes(self.folder.keys[number].with_suffix(".pub").read_bytes())
            self.commands[f"node-{number}"] = [*self.folder.client(number, str(number)), "--peers", peers]
        self.running = {name: self._start(name) for name in self.commands}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_LOG_LEVEL": "WARNING"}
        environment = {**ENVIRONMENT, **quiet, "DEATHS": str(self.path / "deaths"), "WHO": name, "SIGNAL": self.by.name}
        command = [sys.executable, str(DYING), self.deaths.get(name, "none"), *map(str, self.commands[name])]
        with open(self.path / f"{name}.log", "ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True)

    def finish(self, seconds: float) -> None:
        """Start again whoever killed itself, until the server has finished."""
        due = time.monotonic() + seconds
        while time.monotonic() < due:
            for name, process in self.running.items():
                if process.poll() in (-signal.SIGKILL, DRAINED):
                    self.died[name] = self.died.get(name, 0) + 1
                    self.running[name] = self._start(name)
            if self.running["server"].poll() is not None:
                assert self.running["server"].returncode == 0, self.log("server")
                return
            time.sleep(0.2)
        raise AssertionError(f"not finished in {seconds:.0f} s:\n{self.log('server')}")

    def log(self, name: str) -> str:
        return (self.path / f"{name}.log").read_text()[-4000:]

    def end(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait(10)


def survivors(run: Path) -> dict[int, list[int]]:
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    return {line["round"]: line["clients"] for line in lines}


def serial_model(run: Path, counted: dict[int, list[int]]) -> dict[str, torch.Tensor]:
    """What the serial engine makes of the same experiment, if these clients' replies come in each round."""
    settings = config.from_file(run / "experiment.toml")
    same = assemble(config.resolve({**settings, "engine": {"name": "serial"}}))
    work = same.plan.engine.run

    def only(order, clients):
        return work(order, [client for client in clients if client in counted[order.round.index]])

    same.plan.engine.run = only  # type: ignore[method-assign]
    state = [step.state for step in play(same.plan, same.method.begin(same.setup), 0)][-1]
    same.layout.bind(same.module, state.weights.clone())
    return {name: tensor.clone() for name, tensor in same.module.state_dict().items()}


def check(federation: Federation, seconds: float) -> None:
    try:
        federation.finish(seconds)
    finally:
        federation.end()
    run = federation.path / "run"
    counted = survivors(run)
    model = safetensors.torch.load((run / "model.safetensors").read_bytes())
    expected = serial_model(run, counted)
    for name, tensor in expected.items():
        assert torch.equal(model[name], tensor), name
    asked = sum(len(deaths.split(",")) for deaths in federation.deaths.values())
    assert sum(federation.died.values()) == asked, federation.died


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_a_server_and_four_nodes_of_which_one_dies(tmp_path):
    deaths = {"node-1": "1:mask", "server": "2:kept"}
    check(Federation(tmp_path, 4, 4, deaths), 500)


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_a_node_that_is_asked_to_stop_after_its_words_helps_to_open_them_first(tmp_path):
    """All three of three must, or the sum is never opened and the round never repeated."""
    federation = Federation(tmp_path, 3, 3, {"node-1": "1:endorse"}, signal.SIGTERM)
    check(federation, 500)
    assert survivors(tmp_path / "run") == {index: [0, 1, 2] for index in range(3)}
    assert federation.log("node-1").count("asked to stop") == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_rounds_with_three_of_ten_killed_at_every_step_and_a_server_killed_three_times(tmp_path):
    steps = ("advertise", "share", "mask", "endorse", "reveal")
    deaths = {}
    for node in range(9):
        mine = [f"{2 + 3 * place}:{step}" for place, step in enumerate(steps) if (node + place) % 3 == 0]
        deaths[f"node-{node}"] = ",".join(mine)
    deaths["server"] = "3:begun,9:shares,17:kept"
    federation = Federation(tmp_path, 10, 20, deaths)
    check(federation, 1700)
