"""What goes wrong in a federation, with real processes: the outcome is as the documents promise."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import fedrts
from federating import ENVIRONMENT, EXPERIMENT, Folder, Running, free_port, trusting
from fedrts.flower import HELLO
from fedrts.flower.node import Connection, Server, Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Start = Callable[..., Running]


def history(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "history.jsonl").open()]


def timeless(run: Path) -> list[dict[str, Any]]:
    return [{**line, "seconds": 0} for line in history(run)]


def same(here: Path, there: Path) -> bool:
    return all((here / name).read_bytes() == (there / name).read_bytes() for name in ("model.safetensors", "masks.safetensors"))


@contextlib.contextmanager
def rogue(folder: Folder, number: int, answer: Callable[[Message, Worker], Message], clients: list[int]) -> Iterator[None]:
    """A node in this process, with a registered key and bad manners."""
    server = Server(f"127.0.0.1:{folder.port}", folder.keys[number], folder.authority.certificate)
    key = server.private_key()
    assert key is not None
    folder.bind(number, clients)
    worker, stopped = Worker(trusting(clients=clients), lambda text: None), threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            with contextlib.suppress(Exception), Connection(server, (key, key.public_key()), registered=True) as connection:
                while not stopped.is_set():
                    connection.handle(lambda message: answer(message, worker))
                    time.sleep(0.2)
            time.sleep(0.5)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(20)


def test_a_killed_node_that_comes_back_misses_nothing(start: Start, folder: Folder, tmp_path: Path):
    server = start(*folder.server())
    start(*folder.client(0, "0,1,2"))
    victim = start(*folder.client(1, "3,4,5"))
    victim.until("worked for client")
    server.until("round    1 of 3")
    victim.kill()
    start(*folder.client(1, "3,4,5"))
    assert server.ended(240) == 0, server.text
    fedrts.run(folder.experiment, engine="serial", out=tmp_path / "serial")
    assert same(folder.path / "run", tmp_path / "serial")


def test_a_killed_node_remembers_what_its_uploads_left_out(start: Start, folder: Folder, tmp_path: Path):
    """With error feedback: the node that comes back goes on from what it kept on disk, to the bits of the serial engine."""
    text = EXPERIMENT.replace("rounds = 3", "rounds = 6").replace("per_round = 4", "per_round = 6")
    folder.experiment.write_text(text + '[wire]\nvalue_type = "int2"\nfeedback = true\n')
    server = start(*folder.server())
    start(*folder.client(0, "0,1,2"))
    victim = start(*folder.client(1, "3,4,5"))
    server.until("round    3 of 6")  # by now it has told less than it learned, three times
    victim.kill()
    back = start(*folder.client(1, "3,4,5"))
    assert server.ended(240) == 0, server.text
    assert "not told" not in back.text, "it found what it had kept"
    lines = history(folder.path / "run")
    assert [line["clients"] for line in lines] == [[0, 1, 2, 3, 4, 5]] * 6
    fedrts.run(folder.experiment, engine="serial", out=tmp_path / "serial")
    assert same(folder.path / "run", tmp_path / "serial")


def test_without_a_dead_node_the_round_goes_on(start: Start, folder: Folder):
    folder.experiment.write_text(EXPERIMENT.replace("per_round = 4", "per_round = 6").replace("timeout = 90", "timeout = 240"))
    server = start(*folder.server())
    start(*folder.client(0, "0,1,2,3"))
    victim = start(*folder.client(1, "4,5"))
    server.until("round    1 of 3")
    victim.kill()
    assert server.ended(300) == 0, server.text
    line = history(folder.path / "run")[-1]
    assert line["clients"] == [0, 1, 2, 3]
    assert {entry["reason"] for entry in line["rejected"]} == {"not reachable"}


def test_a_node_that_hangs_is_late_and_one_that_joins_late_takes_part(start: Start, folder: Folder):
    text = EXPERIMENT.replace("rounds = 3", "rounds = 20").replace("per_round = 4", "per_round = 6").replace("timeout = 90", "timeout = 8")
    folder.experiment.write_text(text.replace("wait = 90", "wait = 45"))
    server = start(*folder.server())
    start(*folder.client(0, "0,1"))
    hanging = start(*folder.client(1, "2,3"))
    server.until("round    2 of 20")  # without clients 4 and 5
    hanging.kill(signal.SIGSTOP)
    late = start(*folder.client(2, "4,5"))
    late.until("worked for client")
    hanging.kill(signal.SIGCONT)
    assert server.ended(300) == 0, server.text
    lines = history(folder.path / "run")
    assert lines[0]["clients"] == [0, 1, 2, 3]
    reasons = {entry["reason"] for line in lines for entry in line["rejected"]}
    assert reasons == {"not reachable", "late"}
    assert any({4, 5} <= set(line["clients"]) for line in lines)


def zeros(message: Message, worker: Worker) -> Message:
    """1 GB of zeros, as small on the wire as Flower makes it: one piece, named two hundred times."""
    if message.metadata.message_type == HELLO:
        return worker.reply(message)
    data = bytes(2**30)
    blobs = ArrayRecord({"4": Array("uint8", (len(data),), "fedrts", data)})
    return Message(RecordDict({"facts": ConfigRecord({}), "blobs": blobs}), reply_to=message)


def garbage(message: Message, worker: Worker) -> Message:
    if message.metadata.message_type == HELLO:
        return worker.reply(message)
    blobs = ArrayRecord({"4": Array("uint8", (99,), "fedrts", b"FRTS" + os.urandom(95))})
    return Message(RecordDict({"facts": ConfigRecord({"missing": ["x"]}), "blobs": blobs}), reply_to=message)


@pytest.mark.parametrize(("answer", "reason"), [(zeros, "bytes, which is the most"), (garbage, "format version")])
def test_a_node_that_sends_nonsense_is_rejected_by_name_and_reason(start: Start, folder: Folder, answer: Any, reason: str):
    folder.experiment.write_text(EXPERIMENT.replace("per_round = 4", "per_round = 6").replace("rounds = 3", "rounds = 2"))
    server = start(*folder.server())
    start(*folder.client(0, "0,1,2"))
    with rogue(folder, 1, answer, [3, 4]):
        start(*folder.client(2, "5"))
        assert server.ended(240) == 0, server.text
    lines = history(folder.path / "run")
    assert [line["clients"] for line in lines] == [[0, 1, 2, 5]] * 2
    assert any(entry["client"] == 4 and reason in entry["reason"] for entry in lines[0]["rejected"]), lines[0]["rejected"]
    peak = max(int(line.split()[1]) for line in server.peak)
    assert peak < 1_000_000, f"{peak} kB"


def test_a_server_killed_at_any_moment_goes_on_to_the_same_result(start: Start, folder: Folder, tmp_path: Path):
    folder.experiment.write_text(EXPERIMENT.replace("rounds = 3", "rounds = 6"))
    nodes = [start(*folder.client(number, clients)) for number, clients in enumerate(("0,1", "2,3", "4,5"))]
    for round_number in (1, 3, 4):
        server = start(*folder.server())
        server.until(f"round    {round_number} of 6")
        time.sleep(0.13 * round_number)
        server.kill()
        server.ended()
    server = start(*folder.server())
    assert server.ended(240) == 0, server.text
    assert [node.ended(60) for node in nodes] == [0, 0, 0], "nodes come back by themselves, and end with the study"
    fedrts.run(folder.experiment, engine="serial", out=tmp_path / "serial")
    assert same(folder.path / "run", tmp_path / "serial")
    assert timeless(folder.path / "run") == timeless(tmp_path / "serial")


@pytest.mark.parametrize("settings", [{"method": "fedtopk"}, {"method": "fedrts", "wire": {"value_type": "int2", "feedback": True}}])
def test_a_run_on_real_nodes_is_resumed_to_the_bits_of_the_serial_engine(tmp_path: Path, settings: dict[str, Any]):
    """Its newest checkpoint is lost: nodes of a new process play the last round again, from the memories of the first ones."""
    small: dict[str, Any] = {"recipe": "paper", "data": "digits", "clients": {"total": 4, "per_round": 2}, "train": {"epochs": 1}}
    small |= {"model_options": {"hidden": [8]}, "device": "cpu", "rounds": 6, "checkpoint": {"every": 1}, "topology": {"interval": 2}}
    fedrts.run(out=tmp_path / "here", engine="serial", **small, **settings)
    fedrts.run(out=tmp_path / "there", engine={"name": "flower", "nodes": 2}, **small, **settings)
    model = (tmp_path / "here" / "model.safetensors").read_bytes()
    assert (tmp_path / "there" / "model.safetensors").read_bytes() == model
    max((tmp_path / "there" / "checkpoint").glob("*.safetensors")).unlink()
    for name in ("summary.json", "model.safetensors"):
        (tmp_path / "there" / name).unlink()
    fedrts.resume(tmp_path / "there")
    assert (tmp_path / "there" / "model.safetensors").read_bytes() == model
    assert all("not told" not in log.read_text() for log in (tmp_path / "there").glob("node-*.log"))


def test_a_full_disk_stops_the_server_resumably(start: Start, folder: Folder, tmp_path: Path):
    command = [sys.executable, "-m", "fedrts", *map(str, folder.server())]
    start(*folder.client(0, "0,1,2"))
    start(*folder.client(1, "3,4,5"))
    limited = subprocess.run(
        ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *command], capture_output=True, text=True, env=ENVIRONMENT, timeout=240
    )
    assert limited.returncode == 2
    assert "cannot write" in limited.stderr
    assert "Traceback" not in limited.stderr
    server = start(*folder.server())
    assert server.ended(240) == 0, server.text
    fedrts.run(folder.experiment, engine="serial", out=tmp_path / "serial")
    assert same(folder.path / "run", tmp_path / "serial")


def test_a_revoked_key_is_refused_while_the_server_runs(start: Start, folder: Folder):
    folder.experiment.write_text(EXPERIMENT.replace("rounds = 3", "rounds = 10"))
    server = start(*folder.server())
    start(*folder.client(0, "0,1,2,3"))
    revoked = start(*folder.client(1, "4,5"))
    server.until("round    1 of 10")
    folder.authority.revoke("site-1")
    assert revoked.ended(60) == 77
    assert "was revoked" in revoked.text
    assert "refused from now on: site-1" in server.until("refused from now on")
    assert server.ended(300) == 0, server.text


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_local_deployment_leaves_no_process(start: Start, tmp_path: Path, how: int):
    run = start("run", "--engine", "flower", "--clients", 2, "--rounds", 200, "--set", "engine.nodes=2", "--out", tmp_path / "run")
    run.until("writing to")
    below = run.descendants()
    assert len(below) == 3
    run.kill(how)
    assert run.ended(30) == (-9 if how == signal.SIGKILL else 130)
    due = time.monotonic() + 15
    while (alive := [pid for pid in below if Path(f"/proc/{pid}").exists()]) and time.monotonic() < due:
        time.sleep(0.2)
    assert not alive
    if how != signal.SIGKILL:
        assert f"fedrts resume {tmp_path / 'run'}" in run.text


def test_sites_with_data_of_their_own(start: Start, folder: Folder):
    rng = np.random.default_rng(0)
    for name, count in (("coordinator", 60), ("a", 80), ("b", 50)):
        y = np.arange(count) % 3
        x = (rng.standard_normal((count, 12)) + y[:, None]).astype(np.float32)
        np.savez(folder.path / f"{name}.npz", x=x, y=y, x_test=x, y_test=y)
    folder.experiment.write_text(
        f"""
        data = "npz:{folder.path}/coordinator.npz"
        rounds = 4
        clients = {{total = 2, per_round = 2, partition = "sites"}}
        train = {{epochs = 1, batch_size = 10, lr = 0.1}}
        engine = {{wait = 90}}
        """
    )
    server = start(*folder.server())
    for number, name in enumerate(("a", "b")):
        start(*folder.site(number), "--data", f"npz:{folder.path}/{name}.npz")
    assert server.ended(240) == 0, server.text
    samples = [entry["samples"] for entry in json.loads((folder.path / "run" / "clients.json").read_text())]
    assert sorted(samples) == [50, 80]
    assert history(folder.path / "run")[-1]["clients"] == [0, 1]


def test_flowers_own_supernode_can_stand_for_clients(start: Start, folder: Folder, tmp_path: Path):
    folder.experiment.write_text(EXPERIMENT.replace("rounds = 3", "rounds = 2"))
    server = start(*folder.server())
    server.until("waiting for nodes")
    start(*folder.client(0, "0,1,2"))
    folder.bind(1, [3, 4, 5])
    home = tmp_path / "home"
    home.mkdir()
    binaries = Path(sys.executable).parent
    environment = {**ENVIRONMENT, "FLWR_HOME": str(home), "PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": "src"}
    command = [binaries / "flower-supernode", "--superlink", f"127.0.0.1:{folder.port}", "--port", free_port()]
    command += ["--root-certificates", folder.authority.certificate, "--auth-supernode-private-key", folder.keys[1]]
    command += ["--node-config", f'partition="3,4,5" accept="any" min-samples=1 min-batch=1 state="{tmp_path / "site"}"']
    with open(tmp_path / "supernode.log", "wb") as log:
        node = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            assert server.ended(300) == 0, server.text + (tmp_path / "supernode.log").read_text()
        finally:
            node.terminate()
            node.wait(30)
    fedrts.run(folder.experiment, engine="serial", out=tmp_path / "serial")
    assert same(folder.path / "run", tmp_path / "serial")
