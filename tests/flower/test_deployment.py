"""One deployment of real processes, and everything that it shows: a server, three nodes, six clients, TLS and keys.

Nodes come through a proxy that counts bytes and, where it is installed, through nginx with the configuration that we ship.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from ssl import TLSVersion

import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")


import fedrts
from federating import EXPERIMENT, CountingProxy, Folder, Running, nginx, processes, speaks, status
from fedrts.errors import InputError
from fedrts.flower import keys
from fedrts.flower.host import Host
from fedrts.flower.node import Server, serve

pytestmark = pytest.mark.timeout(400)  # everything at once on two busy cores

LARGE = EXPERIMENT + "model_options = {hidden = [1024, 1024]}\n"


class Shown:
    """What the deployment left."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.run = folder, folder.path / "run"
        self.refusals: dict[str, str] = {}
        self.server: Running
        self.code = self.here = -1
        self.statuses: dict[str, int] = {}
        self.versions: list[TLSVersion] = []
        self.proxy: CountingProxy


def refused(host: Host, server: Server) -> str:
    with pytest.raises(InputError) as caught:
        serve(host, server, lambda text: None, patience=2)
    return str(caught.value)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    shown = Shown(folder := Folder(tmp_path_factory.mktemp("deployment"), experiment=LARGE))
    stranger = keys.issue("stranger", folder.path / "stranger")[0]
    other = keys.Authority(folder.path / "other")
    other.init([])
    with contextlib.ExitStack() as stack, processes() as start:
        shown.server = start(*folder.server())
        shown.server.until("waiting for nodes")
        ca, address = folder.authority.certificate, f"127.0.0.1:{folder.port}"
        shown.refusals["stranger"] = refused(Host(clients=[0]), Server(address, stranger, ca))
        shown.refusals["wrong authority"] = refused(Host(clients=[0]), Server(address, folder.keys[0], other.certificate))
        shown.refusals["plain"] = refused(Host(clients=[0]), Server(address, insecure=True))
        shown.refusals["no key"] = refused(Host(clients=[0]), Server(address, ca=ca))
        front = folder.port
        if shutil.which("nginx"):
            front = stack.enter_context(nginx(folder))
            paths = ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/", "/v1/fleet/pull-messages")
            shown.statuses = {path: status(folder, front, path) for path in paths}
            shown.versions = [version for version in (TLSVersion.TLSv1_2, TLSVersion.TLSv1_3) if speaks(folder, front, version)]
        shown.here = status(folder, folder.port, "/v1/control/list-runs")
        shown.proxy = CountingProxy(front)
        for number in range(3):
            start(*folder.client(number, f"{number},{number + 3}", shown.proxy.port))
        shown.code = shown.server.ended(110)
        shown.proxy.close()
    return shown


def test_it_ends_well(shown: Shown):
    assert shown.code == 0, shown.server.text
    assert json.loads((shown.run / "summary.json").read_text())["rejected_replies"] == 0


def test_it_equals_the_serial_engine_bit_for_bit(shown: Shown, tmp_path: Path):
    fedrts.run(shown.folder.experiment, engine="serial", out=tmp_path / "serial")
    for name in ("model.safetensors", "masks.safetensors", "topology.jsonl", "clients.json"):
        assert (shown.run / name).read_bytes() == (tmp_path / "serial" / name).read_bytes(), name
    here, there = ([json.loads(line) for line in (path / "history.jsonl").open()] for path in (shown.run, tmp_path / "serial"))
    assert [{**line, "seconds": 0} for line in here] == [{**line, "seconds": 0} for line in there]


def test_the_bytes_counted_are_those_on_the_wire(shown: Shown):
    summary = json.loads((shown.run / "summary.json").read_text())
    for counted, travelled in ((summary["upload_bytes"], shown.proxy.up), (summary["download_bytes"], shown.proxy.down)):
        assert counted > 5_000_000
        assert counted < travelled < 1.02 * counted + 100_000, "encryption, Flower's frames, heartbeats and questions are all beside it"


def test_strangers_are_refused_and_the_server_says_who_and_why(shown: Shown):
    assert "not registered" in shown.refusals["stranger"]
    assert "is not who --ca vouches for" in shown.refusals["wrong authority"]
    assert "could not be reached" in shown.refusals["plain"]
    assert "use --key" in shown.refusals["no key"]
    said = [line for line in shown.server.lines if line.startswith("refused: ")]
    name = keys.fingerprint((shown.folder.path / "stranger" / "stranger.pub").read_bytes())
    assert any(name in line and "/v1/fleet/activate-node" in line for line in said), said
    assert any("no TLS connection" in line and "UNKNOWN_CA" in line for line in said), said
    assert any("no TLS connection" in line and "HTTP_REQUEST" in line for line in said), said


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_the_proxy_passes_nodes_and_nothing_else(shown: Shown):
    fleet = shown.statuses.pop("/v1/fleet/pull-messages")
    assert fleet == 401, "the server itself answers that this is no node"
    assert set(shown.statuses.values()) == {403}
    assert shown.versions == [TLSVersion.TLSv1_3]
    assert shown.here not in (403, 502), "from this machine Flower can be controlled: nobody else should have an account on it"


def test_what_a_server_says_of_its_nodes(shown: Shown):
    for number in range(3):
        assert f"connected: node 'site-{number}' with clients {number}, {number + 3}" in shown.server.text
    roster = json.loads((shown.run / "roster.json").read_text())
    assert sorted(map(int, roster)) == list(range(6))
