"""The federation of docs/deployment.md, word for word, with real processes: three clinics with images of their own, and what goes wrong.

From nothing to the first finished round and on to the end of the study. On the way a stranger and a clinic too many are refused, one
clinic is killed and comes back, another hangs and is late, one is removed, taken in again, and withdraws; the server is stopped and goes
on. Every command is the page's, typed into a shell: only addresses, folders, digests and the names of clinics are this machine's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")
pytest.importorskip("PIL", reason="fedrts[images] is not installed")
pytest.importorskip("prometheus_client", reason="fedrts[metrics] is not installed")

from PIL import Image

from documented import TESTED, WORD_FOR_WORD, blocks, commands
from federating import Running, free_port, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # a dozen processes that import torch, on a machine that may be busy

ROUNDS = 50
CLINICS = ("clinic-a", "clinic-b", "clinic-c")
Replaced = Mapping[str, str]
NOTHING: Replaced = {}
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
OWN_MODEL = """
import torch


def net(input_shape, classes):
    layers = torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU()
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, classes))
"""


def images(folder: Path, seed: int, count: int = 100) -> None:
    """A clinic's folder: two classes, one brighter than the other."""
    rng = np.random.default_rng(seed)
    for label, name in enumerate(("healthy", "ill")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 100, (40, 40, 3)) + 90 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")


class Study:
    """The page's machines on this one: a folder each."""

    def __init__(self, path: Path, start: Callable[..., Running]) -> None:
        self.start, self.places = start, {name: path / name for name in ("coordinator", *CLINICS, "clinic-d", "stranger")}
        self.address, self.metrics = f"127.0.0.1:{free_port()}", free_port()
        self.ran: set[str] = set()
        for place in self.places.values():
            place.mkdir()
        self.coordinator = self.places["coordinator"]
        self.run = self.coordinator / "runs" / "study"

    def at(self, place: str, *words: str, more: str = "", replaced: Replaced = NOTHING) -> Running:
        """Type the first command of the page that has these words; clinic-a is whichever clinic types it."""
        line = next(line for line in commands() if all(f" {word} " in f" {line} " for word in words))
        self.ran.add(line)
        here = {"fl.example.org:8443": self.address, "127.0.0.1:9092": self.address, "/site/data": str(self.places[place] / "images")}
        if place == "coordinator":
            here |= {"--metrics 9464": f"--metrics {self.metrics}"}
        else:
            here |= {"clinic-a": place, "--metrics 9464": f"--metrics {free_port()}"}
        typed = line
        for old, new in {**here, **replaced}.items():
            typed = typed.replace(old, new)
        return self.start(typed=f"{typed} {more}", cwd=self.places[place], PATH=PATH, PYTHONPATH=str(self.places[place] / "code"))

    def done(self, place: str, *words: str, more: str = "", replaced: Replaced = NOTHING) -> str:
        """The same, of a command that ends by itself."""
        running = self.at(place, *words, more=more, replaced=replaced)
        assert running.ended(300) == 0, running.text
        return running.text

    def client(self, place: str, more: str = "") -> Running:
        return self.at(place, "client", "--data", more=more)

    def lines(self) -> list[dict[str, Any]]:
        history = self.run / "history.jsonl"
        return [json.loads(line) for line in history.read_text().splitlines()] if history.exists() else []

    def scraped(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_federation_of_the_page(tmp_path: Path):
    with processes() as start:
        study = Study(tmp_path, start)
        study.done("stranger", "run", "--engine")
        assert len(list((study.places["stranger"] / "runs").glob("*/summary.json"))) == 1
        keys_are_made_and_registered(study)
        server, clinics, consent = the_first_round(study)
        a_clinic_dies_and_comes_back(study, server, clinics, consent)
        a_clinic_hangs(study, server, clinics)
        server = the_server_stops_and_goes_on(study, server, clinics)
        a_clinic_leaves(study, server, clinics)
        assert server.ended(600) == 0, server.text
        for clinic in (clinics["clinic-b"], clinics["clinic-c"]):
            assert clinic.ended(60) == 0, clinic.text
            assert "the study is finished" in clinic.text
        what_the_study_leaves(study)
        the_logs_hang_together(study)
        a_model_of_ones_own(study)
        assert "11,181,642 parameters" in study.done("coordinator", "cost")
        assert study.ran == {command for command, test in TESTED.items() if test == WORD_FOR_WORD}


def keys_are_made_and_registered(study: Study) -> None:
    study.done("coordinator", "keys", "init")
    for number, name in enumerate((*CLINICS, "clinic-d", "stranger")):
        study.done(name, "keys", "issue")
        place = study.places[name]
        images(place / "images", number)
        shutil.copy(study.coordinator / "authority" / "ca.pem", place)
        shutil.copy(place / f"{name}.pub", study.coordinator)
    for name in CLINICS:
        study.done("coordinator", "register", f"{name}.pub")
    study.done("coordinator", "register", "clinic-c.pub", replaced={"clinic-c": "clinic-d"})


def the_first_round(study: Study) -> tuple[Running, dict[str, Running], str]:
    """The server, the clinics, and the words of consent."""
    (text,) = (block for _, block in blocks() if block.startswith("# study.toml"))
    assert f"rounds = {ROUNDS}" in text
    (study.coordinator / "study.toml").write_text(text)
    server = study.at("coordinator", "server", "study.toml")
    server.until("waiting for nodes")

    stranger = study.client("stranger", "--accept any")
    assert stranger.ended(180) == 77
    assert "not registered" in stranger.text
    hasty = study.client("clinic-a")
    assert hasty.ended(180) == 77, "nobody has agreed to anything"
    looking = study.client("clinic-a", "--dry-run")
    assert looking.ended(180) == 0, looking.text
    found = re.search(r"--accept ([0-9a-f]{16})", looking.text)
    assert found is not None, looking.text
    assert found[0] in hasty.text
    assert "weights on the mask" in looking.text

    clinics = {name: study.client(name, found[0]) for name in CLINICS}
    for clinic in clinics.values():
        clinic.until("taking part in fedrts")
    one_too_many = study.client("clinic-d", found[0])
    while not study.lines():
        assert server.process.poll() is None, server.text
        time.sleep(0.1)
    assert study.lines()[0]["clients"] == [0, 1, 2], "three sites, from nothing to the first finished round"
    assert one_too_many.ended(180) == 77
    assert "all 3 sites of the experiment are known" in one_too_many.text
    return server, clinics, found[1]


def a_clinic_dies_and_comes_back(study: Study, server: Running, clinics: dict[str, Running], digest: str) -> None:
    """Its service manager starts it again. Meanwhile the study waits, so we look around."""
    clinics["clinic-b"].kill()
    server.until("LOST")
    before = len(study.lines())
    assert "clinic-c" in study.done("coordinator", "roster", "runs/study")
    study.done("coordinator", "rename")
    (study.coordinator / "watch.token").write_text("sixteen or more letters".replace(" ", "-"))
    watch = study.at("coordinator", "watch")
    address = watch.until("watching").split()[-1]
    assert address == "http://127.0.0.1:9465/"
    assert status(address) == 200
    watch.kill(signal.SIGTERM)
    assert watch.ended(60) == 130
    port = free_port()
    watch = study.at("coordinator", "watch", "--address", replaced={"10.0.0.5:9465": f"127.0.0.1:{port}"})
    watch.until("watching")
    assert status(f"http://127.0.0.1:{port}/") == 403
    assert status(f"http://127.0.0.1:{port}/?token=sixteen-or-more-letters") == 200
    watch.kill(signal.SIGTERM)
    assert watch.ended(60) == 130
    assert len(study.lines()) <= before + 1, "nobody trains on alone"
    clinics["clinic-b"] = study.at("clinic-b", "client", "--accept", replaced={"1f0c6a92b3d47e58": digest})
    clinics["clinic-b"].until("worked for client 1")


def a_clinic_hangs(study: Study, server: Running, clinics: dict[str, Running]) -> None:
    clinics["clinic-a"].kill(signal.SIGSTOP)
    server.until("client 0 (clinic-a)")  # loudly: it is late, or seems to be gone
    clinics["clinic-a"].kill(signal.SIGCONT)


def the_server_stops_and_goes_on(study: Study, server: Running, clinics: dict[str, Running]) -> Running:
    server.kill(signal.SIGTERM)
    assert server.ended(120) == 130, server.text
    done = len(study.lines())
    assert 1 <= done < ROUNDS - 10
    shutil.copy(study.run / "audit.head", study.coordinator / "last-year.head")
    clinics["clinic-a"].kill(signal.SIGTERM)
    assert clinics["clinic-a"].ended(60) == 130
    server = study.at("coordinator", "server", "study.toml", "--metrics")
    server.until("waiting for nodes")
    clinics["clinic-a"] = study.at("clinic-a", "client", "--metrics")
    clinics["clinic-a"].until("worked for client 0")
    found = study.scraped()
    assert found["fedrts_ready"] == 1
    assert found["fedrts_rounds_planned"] == ROUNDS
    assert found["fedrts_rounds_done"] >= done
    return server


def a_clinic_leaves(study: Study, server: Running, clinics: dict[str, Running]) -> None:
    study.done("coordinator", "remove", "0")
    assert clinics["clinic-a"].ended(120) == 77
    assert "removed" in clinics["clinic-a"].text
    study.done("coordinator", "readmit", "0")
    clinics["clinic-a"] = study.client("clinic-a")
    clinics["clinic-a"].until("worked for client 0")
    clinics["clinic-a"].kill(signal.SIGTERM)
    assert clinics["clinic-a"].ended(60) == 130
    said = study.done("clinic-a", "client", "--withdraw")
    assert "takes part no more" in said
    server.until("withdrawn")
    study.done("coordinator", "keys", "revoke")
    server.until("refused from now on: clinic-a")


def what_the_study_leaves(study: Study) -> None:
    lines, summary = study.lines(), json.loads((study.run / "summary.json").read_text())
    assert [line["round"] for line in lines] == list(range(ROUNDS))
    assert {tuple(line["clients"]) for line in lines} == {(0, 1, 2), (1, 2)}, "nobody trained on alone, but for a clinic that had left"
    assert "withdrawn" in {entry["reason"] for line in lines for entry in line["rejected"]}
    samples = [entry["samples"] for entry in json.loads((study.run / "clients.json").read_text())]
    assert samples == [160, 160, 160], "all that is not held out"
    told = summary["federated"]
    assert [(entry["client"], entry["samples"]) for entry in told["clients"]] == [(1, 40), (2, 40)]
    assert summary["accuracy"] == told["mean"]["accuracy"]
    assert summary["accuracy"] > 0.9
    assert summary["rejected_replies"] == 0


def the_logs_hang_together(study: Study) -> None:
    study.done("coordinator", "audit", "verify")
    study.done("coordinator", "audit", "verify", "--head")
    study.done("clinic-a", "audit", "verify", "clinic-a.site/audit.jsonl")
    shutil.copytree(study.places["clinic-a"] / "clinic-a.site", study.coordinator / "clinic-a.site")  # as an auditor has both
    study.done("coordinator", "audit", "compare")


def a_model_of_ones_own(study: Study) -> None:
    """A second study, under a new certificate of the same authority: all have the package, and say so."""
    study.done("coordinator", "init", "--renew")
    for place in study.places.values():
        (place / "code" / "my_package").mkdir(parents=True)
        (place / "code" / "my_package" / "__init__.py").touch()
        (place / "code" / "my_package" / "nets.py").write_text(OWN_MODEL)
    first = study.coordinator / "study.toml"
    text = first.read_text().replace('model = "cnn"', 'model = "my_package.nets:net"').replace("rounds = 50", "rounds = 2")
    first.write_text(text.replace("total = 3, per_round = 3", "total = 2, per_round = 2"))
    study.run.rename(study.run.with_name("first"))
    server = study.at("coordinator", "server", "study.toml")
    server.until("waiting for nodes")
    unprepared = study.client("clinic-b", "--accept any")
    assert unprepared.ended(180) == 77
    assert "my_package.nets:net" in unprepared.text
    clinics = [study.at(name, "client", "--allow", more="--accept any") for name in ("clinic-b", "clinic-c")]
    assert server.ended(300) == 0, server.text
    assert [clinic.ended(60) for clinic in clinics] == [0, 0]
    study.done("coordinator", "register", "--clients")
