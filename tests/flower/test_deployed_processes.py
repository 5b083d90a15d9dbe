"""The commands of deploy/ as real processes over loopback: server and three sites, from keys to the first finished round.

A folder stands for each container's root, with what the files mount at its place; see tests/deployed.py. What only a container engine
does (the image itself, rights, networks, restarts) is not played here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")
pytest.importorskip("prometheus_client", reason="fedrts[metrics] is not installed")

import deployed
from deployed import DEPLOY, MANIFESTS, UNITS, Part
from federating import Running, free_port, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SITES = ("site-a", "site-b", "site-c")
PAGE = (DEPLOY.parent / "docs" / "deployment.md").read_text("utf-8")
Start = Callable[..., Running]


class Machines:
    """A folder for each program's root, all on loopback."""

    def __init__(self, path: Path, start: Start) -> None:
        self.path, self.start, self.nodes = path, start, free_port()
        self.metrics: dict[str, int] = {}

    def play(self, name: str, part: Part, sources: Mapping[str, Path], more: Mapping[str, str] | None = None) -> Running:
        root = self.path / "roots" / name
        part.furnish(root, sources)
        (root / "tmp").mkdir()
        self.metrics[name] = free_port()
        here = dict.fromkeys(("0.0.0.0:9092", "127.0.0.1:9092", "server:9092"), f"127.0.0.1:{self.nodes}")
        here |= dict.fromkeys(("fl.example.org:8443", "fl.example.org:9092"), f"127.0.0.1:{self.nodes}")
        here |= dict.fromkeys(("0.0.0.0:9464", "9464"), f"127.0.0.1:{self.metrics[name]}") | dict(more or {})
        state = root / "var" / "lib" / "fedrts"
        return self.start(*part.at(root, here), cwd=state, HOME=str(state), TMPDIR=str(root / "tmp"))

    def status(self, name: str, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics[name]}{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def healthy(self, name: str) -> bool:
        """What the image's own HEALTHCHECK says."""
        words = [word.replace("9464", str(self.metrics[name])) for word in deployed.health_check()]
        return subprocess.run([sys.executable, *words], capture_output=True, check=False).returncode == 0

    def first_round(self, server: Running, sites: Mapping[str, Running], run: Path) -> None:
        """All three take part in a finished round; everybody is well; and everybody ends when told to, within the time that is given."""
        due, history = time.monotonic() + 200, run / "history.jsonl"
        while not (history.exists() and history.read_text().count("\n")):
            assert time.monotonic() < due, server.text
            for running in (server, *sites.values()):
                assert running.process.poll() is None, running.text
            time.sleep(0.2)
        assert json.loads(history.read_text().splitlines()[0])["clients"] == [0, 1, 2]
        for name in ("server", *sites):
            assert self.healthy(name), name
            assert [self.status(name, path) for path in ("/healthz", "/readyz")] == [200, 200], name
        for running in (*sites.values(), server):
            running.kill(signal.SIGTERM)
        for running in (*sites.values(), server):
            assert running.ended(100) in (0, 130), running.text
        assert not self.healthy("server")
        for name in ("server", *sites):
            assert not list((self.path / "roots" / name / "tmp").iterdir()), "what is left in memory stays there until the container goes"


def fedrts(folder: Path, *words: object) -> None:
    done = subprocess.run([sys.executable, "-m", "fedrts", *map(str, words)], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def stamped(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*")}


def test_docker_compose_up(tmp_path: Path):
    folder = tmp_path / "deploy"
    shutil.copytree(DEPLOY, folder, ignore=shutil.ignore_patterns("keys"))
    found = deployed.compose()
    keys, here = found["services"]["keys"], folder / "keys"
    here.mkdir()
    script = keys["entrypoint"][1]
    (mounted,) = (volume.split(":")[0] for volume in keys["volumes"] if f":{script}:" in volume)
    tools = tmp_path / "bin"  # without a right to give files away, and without what else is beside Python
    tools.mkdir()
    (tools / "fedrts").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedrts "$@"\n')
    (tools / "chown").write_text('#!/bin/sh\necho "$@" >> given\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    surroundings = {**os.environ, **keys["environment"], "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    for attempt in ("once", "again"):
        done = subprocess.run(
            [keys["entrypoint"][0], folder / mounted], cwd=here, env=surroundings, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{attempt}: {done.stderr}"
    if os.getuid() == 0:
        given = (here / "given").read_text().splitlines()[0].split()[1:]
        assert {(here / name).resolve() for name in given} == {(folder / entry["file"]).resolve() for entry in found["secrets"].values()}
    assert {file.name for file in here.rglob("*.key")} == {"ca.key", "server.key", *(f"{site}.key" for site in SITES)}

    sources = {name: folder / entry["file"] for name, entry in found["secrets"].items()}
    mounts = [deployed.mount(volume) for service in found["services"].values() for volume in service["volumes"]]
    sources |= {mount["source"]: folder / mount["source"] for mount in mounts if mount["source"].startswith("./")}
    for name in found["volumes"]:
        sources[name] = tmp_path / "volumes" / name
        sources[name].mkdir(parents=True)
    before = stamped(here)
    with processes() as start:
        machines = Machines(tmp_path, start)
        running = {name: machines.play(name, part, sources) for name, part in deployed.services().items()}
        assert set(running) == {"server", *SITES}
        machines.first_round(running["server"], {site: running[site] for site in SITES}, sources["server"] / "study")
    assert stamped(here) == before, "what is mounted for reading is only read"
    for site in SITES:
        assert (sources[site] / "site" / "secret").exists()


def images(folder: Path, seed: int) -> Path:
    from PIL import Image

    rng = np.random.default_rng(seed)
    for label, name in enumerate(("healthy", "ill")):
        (folder / name).mkdir(parents=True)
        for number in range(40):
            Image.fromarray((rng.integers(0, 100, (32, 32, 3)) + 90 * label).astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture
def study(tmp_path: Path):
    """Keys as docs/deployment.md makes them, for three clinics with images of their own, and its study.toml."""
    pytest.importorskip("PIL", reason="fedrts[images] is not installed")
    fedrts(tmp_path, "keys", "init", "authority", "--host", "fl.example.org")
    for number, site in enumerate(SITES):
        fedrts(tmp_path, "keys", "issue", "clinic-a", "--dir", site)
        fedrts(tmp_path, "keys", "register", f"{site}/clinic-a.pub", "--dir", "authority", "--name", site)
        images(tmp_path / site / "data", number)
        (tmp_path / site / "state").mkdir()
    (text,) = re.findall(r"^```toml\n(# study.toml\n.*?)^```", PAGE, re.S | re.M)
    assert "{total = 3, per_round = 3}" in text
    (tmp_path / "study.toml").write_text(text)
    (tmp_path / "state").mkdir()
    return tmp_path


DIGEST = {"1f0c6a92b3d47e58": "any"}


def clinic(site: Part, study: Path, name: str) -> tuple[Part, dict[str, Path]]:
    """The unit of a site on its machine, and what lies there."""
    mounts = site.mounts | {"/etc/fedrts/ca.pem": "ca", "/srv/fedrts/data": "data", "/var/lib/fedrts": "state"}
    here = {"/etc/fedrts/clinic-a.key": study / name / "clinic-a.key", "ca": study / "authority" / "ca.pem"}
    return replace(site, mounts=mounts), here | {word: study / name / word for word in ("data", "state")}


def test_systemd_units(study: Path):
    units = {path.stem: deployed.unit_part(path) for path in UNITS}
    server, site = units["fedrts-server"], units["fedrts-site"]
    authority = study / "authority"
    own = {"/etc/fedrts/study.toml": "study", "/var/lib/fedrts": "state", "/etc/fedrts/nodes": "nodes"}
    own |= {f"/etc/fedrts/{name}": name for name in ("ca.pem", "server.pem", "server.key")}
    sources = {name: authority / name for name in ("ca.pem", "server.pem", "server.key", "nodes")}
    with processes() as start:
        machines = Machines(study, start)
        part = replace(server, mounts=server.mounts | own)
        running = machines.play("server", part, sources | {"study": study / "study.toml", "state": study / "state"})
        sites = {}
        for name in SITES:
            sites[name] = machines.play(name, *clinic(site, study, name), DIGEST)
        machines.first_round(running, sites, study / "state" / "study")


def test_kubernetes_manifests(study: Path):
    parts = {path.stem: deployed.pod_part(path) for path in MANIFESTS}
    authority = study / "authority"
    comments = {path.stem: path.read_text("utf-8").partition("apiVersion")[0] for path in MANIFESTS}
    made = re.findall(r"kubectl create (?:secret generic|configmap) (\S+) (.+)", comments["server"])
    sources = {f"{name}/{Path(file).name}": study / file for name, files in made for file in re.findall(r"--from-file=(\S+)", files)}
    sources |= {name: study / file for name, files in made for file in re.findall(r"--from-file=(\S+)", files) if (study / file).is_dir()}
    with processes() as start:
        machines = Machines(study, start)
        running = machines.play("server", unmounted(parts["server"]), sources | {"fedrts-server": study / "state"})
        sites = {}
        for name in SITES:
            folders = {"fedrts-site": study / name / "secret", "fedrts-ca": study / name / "ca"}
            for folder, file in zip(folders.values(), (study / name / "clinic-a.key", authority / "ca.pem"), strict=True):
                folder.mkdir()
                shutil.copy(file, folder)
            # secret and claim of the site have one name, and two kinds
            part = unmounted(parts["site"])
            part = replace(part, mounts={path: "state" if path == "/var/lib/fedrts" else source for path, source in part.mounts.items()})
            here = folders | {"fedrts-data": study / name / "data", "state": study / name / "state"}
            sites[name] = machines.play(name, part, here, DIGEST)
        machines.first_round(running, sites, study / "state" / "study")


def unmounted(part: Part) -> Part:
    """Less what is memory: every root here has a /tmp."""
    return replace(part, mounts={path: source for path, source in part.mounts.items() if path != "/tmp"})


def test_who_is_refused_ends_with_77(study: Path):
    """By which systemd and Kubernetes know that there is nothing to try again."""
    units = {path.stem: deployed.unit_part(path) for path in UNITS}
    shutil.copy(study / "study.toml", study / "authority")
    with processes() as start:
        machines = Machines(study, start)
        sources = {"authority": study / "authority", "state": study / "state"}
        part = replace(units["fedrts-server"], mounts={"/etc/fedrts": "authority", "/var/lib/fedrts": "state"})
        machines.play("server", part, sources).until("waiting for nodes")
        refused = machines.play("site-a", *clinic(units["fedrts-site"], study, "site-a"))
        assert refused.ended(100) == 77, "the digest of the unit is of no experiment"
    (path,) = (path for path in UNITS if path.stem == "fedrts-site")
    assert deployed.unit(path)["RestartPreventExitStatus"] == ["77"]
